//! The serializability checker.
