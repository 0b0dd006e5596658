//! Messages between nodes of a simulated deployment.

use orthodrome_core::id::TxnId;
use orthodrome_core::machine::Message;
use orthodrome_core::txn::{Key, Op, Outcome, Value};

use crate::contract::{FromAgent, PeerRollback, ToAgent};
use crate::source::{Action, Answer, Model, Statement};

/// One message. Its size is that of the statements and rows in a real message.
#[derive(Clone, PartialEq, Eq, Debug, Message)]
#[message(size = size)]
pub enum Msg {
    /// Middleware to agent.
    #[message(
        kind = f0.kind(),
        txn = statements_of(f0).first().map(|statement| statement.txn),
        keys = statements_of(f0).len()
    )]
    ToAgent(ToAgent<Model>),
    /// Agent to middleware.
    #[message(
        kind = f0.kind(),
        keys = if let FromAgent::Answered { answers, .. } = f0 { answers.len() } else { 0 }
    )]
    FromAgent(FromAgent<Model>),
    /// Agent to agent.
    #[message(kind = "PeerRollback")]
    Peer(PeerRollback),
    /// Middleware to middleware: asks for the outcome of this transaction. A middleware that has it
    /// pending ends it.
    Ask {
        /// The client's name for it.
        txn: TxnId,
    },
    /// Middleware to source, past its agent (`near`): asks for rows without locks.
    #[message(keys = keys.len())]
    Look {
        /// The transaction.
        txn: TxnId,
        /// The number of the question in the transaction.
        look: u32,
        /// The rows.
        keys: Vec<Key>,
    },
    /// The answer to [`Msg::Look`]: committed rows, which may be old.
    #[message(keys = answers.len())]
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

/// The bytes of a message.
fn size(msg: &Msg) -> usize {
    HEAD + match msg {
        Msg::ToAgent(msg) => {
            let names = match msg {
                ToAgent::Execute { peers, .. } => 4 * peers.len(),
                ToAgent::After { earlier, order } => {
                    return size(&Msg::ToAgent((**order).clone())) + 24 * earlier.len();
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
        Msg::FromAgent(FromAgent::Answered { answers, .. }) | Msg::Seen { answers, .. } => {
            let row = |read: &Answer| 12 + read.key.len() + value_size(read.read.value.as_ref());
            answers.iter().map(row).sum()
        }
        Msg::Look { keys, .. } => keys.iter().map(|key| STATEMENT + key.len()).sum(),
        Msg::FromAgent(FromAgent::Scanned { prepared, .. }) => 24 * prepared.len(),
        Msg::FromAgent(FromAgent::Waits { waits, .. }) => 48 * waits.len(),
        Msg::FromAgent(_) | Msg::Peer(_) | Msg::Ask { .. } | Msg::Told { .. } => 0,
    }
}
