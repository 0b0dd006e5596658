//! orthodrome-protocols
