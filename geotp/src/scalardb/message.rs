//! Messages between middlewares and sources.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Read, Value, Version};

/// One message. A request has a number, which its answer repeats. Every request may be executed
/// twice.
#[derive(Clone, PartialEq, Eq, Debug, Message)]
#[message(size = size)]
pub enum Msg {
    /// Middleware to source: return these records (read phase, and again to validate).
    #[message(keys = keys.len())]
    Read {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// The answer, in the order of the request.
    #[message(keys = records.len())]
    Records {
        /// The number of the request.
        request: u64,
        /// The records.
        records: Vec<Record>,
    },
    /// Middleware to source: prepare these records, if each is unchanged since it was read; all of
    /// them or none.
    #[message(keys = images.len())]
    Prepare {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
        /// The source that will have its state.
        coordinator: NodeId,
        /// The middleware's clock: a transaction that finds the record long after this may abort
        /// the transaction.
        since: Timestamp,
        /// The records.
        images: Vec<Image>,
    },
    /// The answer. If they are prepared, they stay so until the transaction's state is known.
    Prepared {
        /// The number of the request.
        request: u64,
        /// True if none of them had changed.
        is_done: bool,
    },
    /// Middleware to the source of the coordinator table: store the transaction's state, unless it
    /// has one.
    #[message(keys = 1)]
    PutState {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
        /// The state.
        state: State,
    },
    /// Middleware to the source of the coordinator table: return the transaction's state.
    #[message(keys = 1)]
    GetState {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
    },
    /// The answer to both: the current state. Once there is one, it never changes.
    StateIs {
        /// The number of the request.
        request: u64,
        /// The state; none if there is none.
        state: Option<State>,
    },
    /// Middleware to source: the transaction has committed; its prepared values become the records'
    /// values.
    #[message(keys = keys.len())]
    Commit {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
        /// The commit timestamp.
        at: Timestamp,
        /// The keys.
        keys: Vec<Key>,
    },
    /// Middleware to source: the transaction has aborted; restore these records.
    #[message(keys = keys.len())]
    Rollback {
        /// The number of the request.
        request: u64,
        /// The transaction.
        txn: TxnId,
        /// The keys.
        keys: Vec<Key>,
    },
    /// The answer to both: these records have no prepared value of the transaction any more.
    Ended {
        /// The number of the request.
        request: u64,
    },
}

/// A record as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its key.
    pub key: Key,
    /// The last committed version: the before-image, if the record is prepared.
    pub committed: Read,
    /// The transaction that has prepared it and may have committed since.
    pub prepared: Option<Mark>,
}

/// The mark of the transaction that has prepared a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The transaction.
    pub txn: TxnId,
    /// The source that has its state.
    pub coordinator: NodeId,
    /// When it was prepared, by its middleware's clock.
    pub since: Timestamp,
}

/// A transaction's write of one record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    /// Its key.
    pub key: Key,
    /// The version that was read.
    pub read: Version,
    /// The new value; none deletes.
    pub value: Option<Value>,
}

/// The outcome of a transaction. Written once, never changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It committed.
    Committed(Timestamp),
    /// It aborted.
    Aborted,
}

impl Msg {
    /// The number of the request, in a request and in its answer.
    #[must_use]
    pub fn request(&self) -> u64 {
        match self {
            Self::Read { request, .. }
            | Self::Records { request, .. }
            | Self::Prepare { request, .. }
            | Self::Prepared { request, .. }
            | Self::PutState { request, .. }
            | Self::GetState { request, .. }
            | Self::StateIs { request, .. }
            | Self::Commit { request, .. }
            | Self::Rollback { request, .. }
            | Self::Ended { request } => *request,
        }
    }
}

/// Names, numbers and framing of a message.
const HEAD: usize = 40;
/// The fixed words of one operation on a record, and the columns of its metadata.
const OPERATION: usize = 100;

fn value_size(value: Option<&Value>) -> usize {
    value.map_or(0, Value::len)
}

/// The bytes of a message.
fn size(msg: &Msg) -> usize {
    HEAD + match msg {
        Msg::Read { keys, .. } | Msg::Commit { keys, .. } | Msg::Rollback { keys, .. } => {
            keys.iter().map(|key| OPERATION + key.len()).sum()
        }
        Msg::Records { records, .. } => {
            let size = |record: &Record| {
                OPERATION + record.key.len() + value_size(record.committed.value.as_ref())
            };
            records.iter().map(size).sum()
        }
        // The before-image is included: the record has it in columns of its own.
        Msg::Prepare { images, .. } => {
            let size =
                |image: &Image| OPERATION + image.key.len() + 2 * value_size(image.value.as_ref());
            images.iter().map(size).sum()
        }
        Msg::PutState { .. } | Msg::GetState { .. } => OPERATION,
        Msg::Prepared { .. } | Msg::StateIs { .. } | Msg::Ended { .. } => 0,
    }
}
