//! orthodrome-server

pub mod service;
