//! orthodrome-client
