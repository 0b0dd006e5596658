//! The text form of a run: one line for each event. The text is equal byte for byte if seed and
//! commit are equal.
//!
//! A line is `<at> <node> <event> <peer> <sent> <txn> <kind> <detail…>`, separated by single
//! spaces. Times are in nanoseconds, `-` means that a field does not apply, and the detail extends
//! to the end of the line. In a file, lines that begin with `#` are comments: the command that
//! repeats the run, and where its nodes are.

use std::fmt;
use std::str::FromStr;

use crate::id::{NodeId, TxnId};
use crate::time::Time;

/// The kinds of events.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// A client submitted a transaction.
    Begin,
    /// A client decided an interactive or general transaction.
    Decide,
    /// A client asked for the outcome of a transaction.
    Resolve,
    /// A message arrived from `peer`, sent at `sent`.
    Receive,
    /// A message to `peer` was lost.
    Lose,
    /// A timer expired.
    Timer,
    /// Records became durable.
    Durable,
    /// A client received its reads.
    Reads,
    /// A client received its outcome.
    Finish,
    /// A machine noted a rare event.
    Note,
    /// The environment changed: a crash, a partition, a clock.
    Fault,
    /// A client asked for the next round of reads of a general transaction.
    Read,
}

impl Event {
    const NAMES: [(Self, &'static str); 12] = [
        (Self::Begin, "begin"),
        (Self::Decide, "decide"),
        (Self::Resolve, "resolve"),
        (Self::Receive, "recv"),
        (Self::Lose, "lose"),
        (Self::Timer, "timer"),
        (Self::Durable, "durable"),
        (Self::Reads, "reads"),
        (Self::Finish, "finish"),
        (Self::Note, "note"),
        (Self::Fault, "fault"),
        (Self::Read, "read"),
    ];
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(event, _)| event == self);
        f.write_str(name.map_or("?", |(_, name)| name))
    }
}

/// One line of a trace.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Line {
    /// The time of the event.
    pub at: Time,
    /// The node.
    pub node: NodeId,
    /// The kind of event.
    pub event: Event,
    /// The other node, for a message.
    pub peer: Option<NodeId>,
    /// The time when the message was sent.
    pub sent: Option<Time>,
    /// The transaction.
    pub txn: Option<TxnId>,
    /// One word, such as the kind of a message or the name of a timer; `-` if there is none.
    pub kind: String,
    /// Further details, on one line.
    pub detail: String,
}

struct OrDash<T>(Option<T>);

impl<T: fmt::Display> fmt::Display for OrDash<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Some(value) => value.fmt(f),
            None => f.write_str("-"),
        }
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { at, node, event, peer, sent, txn, kind, detail } = self;
        let (peer, sent, txn) = (OrDash(*peer), OrDash(sent.map(|time| time.0)), OrDash(*txn));
        write!(f, "{} {node} {event} {peer} {sent} {txn} {kind} {detail}", at.0)
    }
}

/// The text is not a line of a trace.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a trace line: field {field} is {found:?}")]
pub struct ParseLineError {
    field: &'static str,
    found: String,
}

impl FromStr for Line {
    type Err = ParseLineError;

    fn from_str(text: &str) -> Result<Self, ParseLineError> {
        let mut fields = text.splitn(8, ' ');
        let mut next = || fields.next().unwrap_or("");
        let (at, node, event, peer) = (next(), next(), next(), next());
        let (sent, txn, kind, detail) = (next(), next(), next(), next());
        let bad = |field, found: &str| ParseLineError { field, found: found.into() };
        Ok(Self {
            at: Time(at.parse().map_err(|_| bad("at", at))?),
            node: node.parse().map_err(|_| bad("node", node))?,
            event: Event::NAMES
                .iter()
                .find(|(_, name)| *name == event)
                .map(|&(event, _)| event)
                .ok_or_else(|| bad("event", event))?,
            peer: optional(peer).map_err(|()| bad("peer", peer))?,
            sent: optional(sent).map_err(|()| bad("sent", sent))?.map(Time),
            txn: optional(txn).map_err(|()| bad("txn", txn))?,
            kind: kind.into(),
            detail: detail.into(),
        })
    }
}

fn optional<T: FromStr>(text: &str) -> Result<Option<T>, ()> {
    if text == "-" { Ok(None) } else { text.parse().map(Some).map_err(|_| ()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_round_trip() {
        for text in [
            "1500 n3 recv n1 1000 c4.19 ReadAndPrepare { keys: [a b] }",
            "0 n1 fault - - - Crash n1",
            "7 n1 finish - - c4.19#1 fast committed@12",
        ] {
            assert_eq!(text.parse::<Line>().unwrap().to_string(), text);
        }
        assert!("x n3 recv".parse::<Line>().is_err());
        assert!("1 n3 jump - - - k d".parse::<Line>().is_err());
    }
}
