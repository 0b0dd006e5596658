//! Ocean Vista: visibility by gossip.

pub mod directory;
pub mod gossiper;
#[cfg(test)]
mod model;
pub mod takeover;
pub mod watermark;
