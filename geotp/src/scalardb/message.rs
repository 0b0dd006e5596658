//! Messages between middlewares and sources.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::machine::Message;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Read, Value, Version};

/// One message. A request has a number of its own, by which its answer is known; whatever it asks for may be done twice.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Msg {
    /// Middleware to source: these records, as they are (read phase, and again to validate).
    Read {
        /// Of this request.
        request: u64,
        /// For whom.
        txn: TxnId,
        /// Which.
        keys: Vec<Key>,
    },
    /// The answer, in the order asked for.
    Records {
        /// As in the request.
        request: u64,
        /// What is there.
        records: Vec<Record>,
    },
    /// Middleware to source: prepare these records, each if it is still what was read; all of them or none.
    Prepare {
        /// Of this request.
        request: u64,
        /// Who writes.
        txn: TxnId,
        /// Where its state will be.
        coordinator: NodeId,
        /// The middleware's clock: whoever finds the record long after this may abort the transaction.
        since: Timestamp,
        /// Which.
        images: Vec<Image>,
    },
    /// The answer. If they are prepared, they stay so until the transaction's state is known.
    Prepared {
        /// As in the request.
        request: u64,
        /// None of them had changed.
        is_done: bool,
    },
    /// Middleware to the source of the coordinator table: this is the transaction's state, unless it has one.
    PutState {
        /// Of this request.
        request: u64,
        /// Whose.
        txn: TxnId,
        /// Which.
        state: State,
    },
    /// Middleware to the source of the coordinator table: what is the transaction's state?
    GetState {
        /// Of this request.
        request: u64,
        /// Whose.
        txn: TxnId,
    },
    /// The answer to both: what it is now, and will be for ever if there is one.
    StateIs {
        /// As in the request.
        request: u64,
        /// None if there is none.
        state: Option<State>,
    },
    /// Middleware to source: the transaction has committed; what it prepared in these records is what they hold.
    Commit {
        /// Of this request.
        request: u64,
        /// Whose.
        txn: TxnId,
        /// When it committed.
        at: Timestamp,
        /// Which.
        keys: Vec<Key>,
    },
    /// Middleware to source: the transaction has aborted; these records hold what they held before.
    Rollback {
        /// Of this request.
        request: u64,
        /// Whose.
        txn: TxnId,
        /// Which.
        keys: Vec<Key>,
    },
    /// The answer to both: nothing of the transaction is left in these records that is not committed.
    Ended {
        /// As in the request.
        request: u64,
    },
}

/// A record as it is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Record {
    /// Its key.
    pub key: Key,
    /// What was committed last: the before-image, if the record is prepared.
    pub committed: Read,
    /// The transaction that has prepared it and may have committed since.
    pub prepared: Option<Mark>,
}

/// Who has prepared a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The transaction.
    pub txn: TxnId,
    /// Where its state is.
    pub coordinator: NodeId,
    /// When it was prepared, by its middleware's clock.
    pub since: Timestamp,
}

/// What a transaction writes into one record.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Image {
    /// Its key.
    pub key: Key,
    /// The version that was read.
    pub read: Version,
    /// The new value; none deletes.
    pub value: Option<Value>,
}

/// What became of a transaction. Put once, never changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum State {
    /// It committed.
    Committed(Timestamp),
    /// It aborted.
    Aborted,
}

impl Msg {
    /// The request's number, in a request and in its answer.
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

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::Read { .. } => "Read",
            Self::Records { .. } => "Records",
            Self::Prepare { .. } => "Prepare",
            Self::Prepared { .. } => "Prepared",
            Self::PutState { .. } => "PutState",
            Self::GetState { .. } => "GetState",
            Self::StateIs { .. } => "StateIs",
            Self::Commit { .. } => "Commit",
            Self::Rollback { .. } => "Rollback",
            Self::Ended { .. } => "Ended",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::Read { txn, .. }
            | Self::Prepare { txn, .. }
            | Self::PutState { txn, .. }
            | Self::GetState { txn, .. }
            | Self::Commit { txn, .. }
            | Self::Rollback { txn, .. } => Some(*txn),
            // They carry the number of the request.
            Self::Records { .. }
            | Self::Prepared { .. }
            | Self::StateIs { .. }
            | Self::Ended { .. } => None,
        }
    }

    fn wire_size(&self) -> usize {
        HEAD + match self {
            Self::Read { keys, .. } | Self::Commit { keys, .. } | Self::Rollback { keys, .. } => {
                keys.iter().map(|key| OPERATION + key.len()).sum()
            }
            Self::Records { records, .. } => {
                let size = |record: &Record| {
                    OPERATION + record.key.len() + value_size(record.committed.value.as_ref())
                };
                records.iter().map(size).sum()
            }
            // The before-image goes along: the record has it in columns of its own.
            Self::Prepare { images, .. } => {
                let size = |image: &Image| {
                    OPERATION + image.key.len() + 2 * value_size(image.value.as_ref())
                };
                images.iter().map(size).sum()
            }
            Self::PutState { .. } | Self::GetState { .. } => OPERATION,
            Self::Prepared { .. } | Self::StateIs { .. } | Self::Ended { .. } => 0,
        }
    }

    fn keys(&self) -> usize {
        match self {
            Self::Read { keys, .. } | Self::Commit { keys, .. } | Self::Rollback { keys, .. } => {
                keys.len()
            }
            Self::Records { records, .. } => records.len(),
            Self::Prepare { images, .. } => images.len(),
            Self::PutState { .. } | Self::GetState { .. } => 1,
            Self::Prepared { .. } | Self::StateIs { .. } | Self::Ended { .. } => 0,
        }
    }
}
