//! Messages between nodes of a simulated deployment.

use orthodrome_core::id::TxnId;
use orthodrome_core::machine::Message;
use orthodrome_core::txn::{Key, Op, Outcome, Value};

use crate::contract::{FromAgent, PeerRollback, ToAgent};
use crate::source::{Action, Answer, Model, Statement};

/// One message. Its size is that of the statements and rows in a real message.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Msg {
    /// Middleware to agent.
    ToAgent(ToAgent<Model>),
    /// Agent to middleware.
    FromAgent(FromAgent<Model>),
    /// Agent to agent.
    Peer(PeerRollback),
    /// Middleware to middleware: asks for the outcome of this transaction. A middleware that has it
    /// pending ends it.
    Ask {
        /// The client's name for it.
        txn: TxnId,
    },
    /// Middleware to source, past its agent (`near`): asks for rows without locks.
    Look {
        /// The transaction.
        txn: TxnId,
        /// The number of the question in the transaction.
        look: u32,
        /// The rows.
        keys: Vec<Key>,
    },
    /// The answer to [`Msg::Look`]: committed rows, which may be old.
    Seen {
        /// The transaction.
        txn: TxnId,
        /// The number from the question.
        look: u32,
        /// The rows.
        answers: Vec<Answer>,
    },
    /// The answer to [`Msg::Ask`].
    Told {
        /// The name from the question.
        txn: TxnId,
        /// Its outcome; none if that middleware does not know it and has logged no decision to
        /// commit it.
        outcome: Option<Outcome>,
    },
}

/// Names, numbers and framing of a message.
const HEAD: usize = 40;
/// A digest of rows.
const DIGEST: usize = 64;
/// The fixed words of one statement.
const STATEMENT: usize = 60;

fn value_size(value: Option<&Value>) -> usize {
    value.map_or(0, Value::len)
}

fn statement_size(statement: &Statement) -> usize {
    let key = statement.action.key().map_or(0, orthodrome_core::txn::Key::len);
    let value = match &statement.action {
        Action::Read { .. } => 0,
        Action::Write { value, .. } | Action::Counted { value, .. } => value_size(value.as_ref()),
        Action::Expect { .. } => DIGEST,
        Action::Apply(op) => match op {
            Op::Put(_, value) | Op::Append(_, value) => value.len(),
            Op::Compare(_, value) => value_size(value.as_ref()),
            Op::Add(..) => 8,
            Op::Get(_) | Op::Delete(_) | Op::Call(_) => 0,
        },
    };
    STATEMENT + key + value
}

/// The statements that a message has for its source.
fn statements_of(msg: &ToAgent<Model>) -> &[Statement] {
    match msg {
        ToAgent::Execute { statements, .. } => statements,
        ToAgent::After { order, .. } => statements_of(order),
        ToAgent::Attach { .. }
        | ToAgent::Ping { .. }
        | ToAgent::Prepare { .. }
        | ToAgent::Commit { .. }
        | ToAgent::Rollback { .. }
        | ToAgent::Interrupt { .. }
        | ToAgent::Scan { .. } => &[],
    }
}

impl Message for Msg {
    fn kind(&self) -> &'static str {
        match self {
            Self::ToAgent(msg) => match msg {
                ToAgent::Attach { .. } => "Attach",
                ToAgent::Ping { .. } => "Ping",
                ToAgent::Execute { .. } => "Execute",
                ToAgent::After { .. } => "After",
                ToAgent::Prepare { .. } => "Prepare",
                ToAgent::Commit { .. } => "Commit",
                ToAgent::Rollback { .. } => "Rollback",
                ToAgent::Interrupt { .. } => "Interrupt",
                ToAgent::Scan { .. } => "Scan",
            },
            Self::FromAgent(msg) => match msg {
                FromAgent::Attached { .. } => "Attached",
                FromAgent::Pong { .. } => "Pong",
                FromAgent::Answered { .. } => "Answered",
                FromAgent::StatementFailed { .. } => "StatementFailed",
                FromAgent::Failed { .. } => "Failed",
                FromAgent::Prepared { .. } => "Prepared",
                FromAgent::Committed { .. } => "Committed",
                FromAgent::Lost { .. } => "Lost",
                FromAgent::RolledBack { .. } => "RolledBack",
                FromAgent::Scanned { .. } => "Scanned",
                FromAgent::Waits { .. } => "Waits",
            },
            Self::Peer(_) => "PeerRollback",
            Self::Ask { .. } => "Ask",
            Self::Look { .. } => "Look",
            Self::Seen { .. } => "Seen",
            Self::Told { .. } => "Told",
        }
    }

    fn txn(&self) -> Option<TxnId> {
        match self {
            Self::ToAgent(msg) => statements_of(msg).first().map(|statement| statement.txn),
            Self::Ask { txn }
            | Self::Told { txn, .. }
            | Self::Look { txn, .. }
            | Self::Seen { txn, .. } => Some(*txn),
            // They carry the name that middleware and agents have for it.
            Self::FromAgent(_) | Self::Peer(_) => None,
        }
    }

    fn wire_size(&self) -> usize {
        HEAD + match self {
            Self::ToAgent(msg) => {
                let names = match msg {
                    ToAgent::Execute { peers, .. } => 4 * peers.len(),
                    ToAgent::After { earlier, order } => {
                        return Self::ToAgent((**order).clone()).wire_size() + 24 * earlier.len();
                    }
                    ToAgent::Attach { .. }
                    | ToAgent::Ping { .. }
                    | ToAgent::Prepare { .. }
                    | ToAgent::Commit { .. }
                    | ToAgent::Rollback { .. }
                    | ToAgent::Interrupt { .. }
                    | ToAgent::Scan { .. } => 0,
                };
                statements_of(msg).iter().map(statement_size).sum::<usize>() + names
            }
            Self::FromAgent(FromAgent::Answered { answers, .. }) | Self::Seen { answers, .. } => {
                let row =
                    |read: &Answer| 12 + read.key.len() + value_size(read.read.value.as_ref());
                answers.iter().map(row).sum()
            }
            Self::Look { keys, .. } => keys.iter().map(|key| STATEMENT + key.len()).sum(),
            Self::FromAgent(FromAgent::Scanned { prepared, .. }) => 24 * prepared.len(),
            Self::FromAgent(FromAgent::Waits { waits, .. }) => 48 * waits.len(),
            Self::FromAgent(_) | Self::Peer(_) | Self::Ask { .. } | Self::Told { .. } => 0,
        }
    }

    fn keys(&self) -> usize {
        match self {
            Self::ToAgent(msg) => statements_of(msg).len(),
            Self::FromAgent(FromAgent::Answered { answers, .. }) | Self::Seen { answers, .. } => {
                answers.len()
            }
            Self::Look { keys, .. } => keys.len(),
            Self::FromAgent(_) | Self::Peer(_) | Self::Ask { .. } | Self::Told { .. } => 0,
        }
    }
}
