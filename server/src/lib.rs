//! orthodrome-server
