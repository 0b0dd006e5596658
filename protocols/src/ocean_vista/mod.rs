//! Ocean Vista: visibility by gossip.

pub mod watermark;
