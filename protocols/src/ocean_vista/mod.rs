//! Ocean Vista: visibility by gossip.

pub mod gossiper;
pub mod watermark;
