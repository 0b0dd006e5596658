//! Bytes of messages between nodes and of records on disk.
//!
//! Schemas are protobuf files in `proto/internal`; each protocol has one, and a file here that
//! converts its messages by hand. Conversions from bytes check everything that a type of `core`
//! promises, never panic, and skip fields they do not know.

pub mod common;

mod carousel;
mod deterministic;
mod natto;
mod ocean_vista;
pub mod replication;
mod tapir;
mod two_phase_locking;

use bytes::{Bytes, BytesMut};
use orthodrome_core::Protocol;

/// What `prost` generated from `proto/internal`.
#[allow(missing_docs, clippy::all, rust_2018_idioms, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/internal.rs"));
}
pub use generated::orthodrome::internal;
use generated::orthodrome::{
    carousel as carousel_schema, deterministic as deterministic_schema, natto as natto_schema,
    ocean_vista as ocean_vista_schema, replication as replication_schema, tapir as tapir_schema,
    two_phase_locking as two_phase_locking_schema,
};

/// Bytes that are not what they should be.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum WireError {
    /// Not of the schema.
    #[error("not a message of the schema: {0}")]
    Schema(String),
    /// A field that must be there is not, or one of its cases is unknown to this version.
    #[error("field {0} is missing, or of a kind this version does not know")]
    Missing(&'static str),
    /// A field holds a value that it cannot hold.
    #[error("field {field} holds {found}, which is not {wanted}")]
    Value {
        /// Which field.
        field: &'static str,
        /// What it holds.
        found: String,
        /// What it may hold.
        wanted: &'static str,
    },
}

impl From<prost::DecodeError> for WireError {
    fn from(error: prost::DecodeError) -> Self {
        Self::Schema(error.to_string())
    }
}

/// A protocol whose machines can be run by this crate: its messages and records have bytes.
pub trait WireProtocol: Protocol {
    /// Appends the bytes of a message.
    fn encode_msg(msg: &Self::Msg, out: &mut BytesMut);

    /// A message from its bytes. Keys and values share them.
    ///
    /// # Errors
    /// The bytes are not of a message. Never panics.
    fn decode_msg(bytes: Bytes) -> Result<Self::Msg, WireError>;

    /// Appends the bytes of a record.
    fn encode_record(record: &Self::Record, out: &mut BytesMut);

    /// A record from its bytes.
    ///
    /// # Errors
    /// The bytes are not of a record. Never panics.
    fn decode_record(bytes: Bytes) -> Result<Self::Record, WireError>;
}

#[cfg(test)]
mod tests;
