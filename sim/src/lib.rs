//! orthodrome-sim
