//! Ocean Vista: visibility by gossip.

pub mod directory;
pub mod gossiper;
pub mod takeover;
pub mod watermark;
