//! Lists the transactions of a trace, so that one can be chosen for a diagram.

use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::trace::{Event, Line, ParseLineError};

use crate::diagram::place;

/// One transaction, with all its attempts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Listed {
    /// Its first attempt in the trace.
    pub txn: TxnId,
    /// The gateway that ran it; none if the trace has neither its begin nor its end.
    pub gateway: Option<NodeId>,
    /// The time of its first event: the begin of the first attempt, if the trace has that.
    pub began: Time,
    /// Number of attempts in the trace.
    pub attempts: u32,
    /// Number of messages received that concern it alone.
    pub messages: u64,
    /// The time and the outcome of its last attempt, as in `committed@42`, and the protocol's path;
    /// none while it is pending.
    pub end: Option<(Time, String, String)>,
    last: TxnId,
}

impl Listed {
    fn new(txn: TxnId, line: &Line) -> Self {
        let began = line.sent.unwrap_or(line.at);
        Self { txn, gateway: None, began, attempts: 1, messages: 0, end: None, last: txn }
    }

    fn add(&mut self, txn: TxnId, line: &Line) {
        if txn.attempt > self.last.attempt {
            self.last = txn;
            self.attempts += 1;
            self.end = None;
        }
        match line.event {
            Event::Begin => self.gateway = Some(line.node),
            Event::Receive => self.messages += 1,
            // The end of an earlier attempt says nothing about the last one.
            Event::Finish if txn == self.last => {
                self.gateway = Some(line.node);
                self.end = Some((line.at, line.detail.clone(), line.kind.clone()));
            }
            Event::Finish
            | Event::Read
            | Event::Decide
            | Event::Resolve
            | Event::Lose
            | Event::Timer
            | Event::Durable
            | Event::Reads
            | Event::Note
            | Event::Fault => {}
        }
    }

    /// The time from its first event to its outcome; none while it is pending.
    #[must_use]
    pub fn latency(&self) -> Option<Duration> {
        self.end.as_ref().map(|(at, ..)| at.since(self.began))
    }
}

/// Reads a trace line by line, and collects its transactions.
#[derive(Clone, Debug, Default)]
pub struct Listing {
    places: OrdMap<NodeId, String>,
    /// By client and counter.
    txns: OrdMap<(u64, u64), Listed>,
}

impl Listing {
    /// Reads one line of a trace, without its line break.
    ///
    /// # Errors
    /// If it is neither a comment nor a line of a trace.
    pub fn read_line(&mut self, text: &str) -> Result<(), ParseLineError> {
        if let Some(comment) = text.strip_prefix('#') {
            self.places.extend(place(comment));
            return Ok(());
        }
        let line: Line = text.parse()?;
        if let Some(txn) = line.txn {
            let name = (txn.client.0, txn.counter);
            self.txns.entry(name).or_insert_with(|| Listed::new(txn, &line)).add(txn, &line);
        }
        Ok(())
    }

    /// The place of a node, such as `VA gateway`; empty if the trace does not say it.
    #[must_use]
    pub fn place(&self, node: NodeId) -> &str {
        self.places.get(&node).map_or("", String::as_str)
    }

    /// All transactions, in the order in which they began.
    #[must_use]
    pub fn in_order(&self) -> Vec<&Listed> {
        let mut all: Vec<&Listed> = self.txns.values().collect();
        all.sort_by_key(|listed| (listed.began, listed.txn));
        all
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

    use super::*;

    fn listing(trace: &str) -> Listing {
        let mut listing = Listing::default();
        trace.lines().for_each(|line| listing.read_line(line).unwrap());
        listing
    }

    #[test]
    fn attempts_are_one_transaction_with_the_outcome_of_the_last() {
        let listing = listing(include_str!("testdata/retried.trace"));
        let all = listing.in_order();
        let [retried, other] = all[..] else { panic!("{all:?}") };
        assert_eq!(
            (retried.txn.to_string().as_str(), retried.attempts, retried.messages),
            ("c4.19", 2, 5)
        );
        assert_eq!(retried.gateway.map(|node| listing.place(node)), Some("VA gateway"));
        assert_eq!(retried.latency(), Some(Duration::from_micros(201_500)));
        let (_, outcome, path) = retried.end.as_ref().unwrap();
        assert_eq!((outcome.as_str(), path.as_str()), ("committed@1700000000301000000", "fast"));
        // The trace has one message of it, and neither its begin nor its end.
        assert_eq!((other.txn.to_string().as_str(), other.messages), ("c4.20", 1));
        assert_eq!((other.gateway, other.latency()), (None, None));
    }

    #[test]
    fn a_transaction_is_pending_while_its_last_attempt_is() {
        let trace = "1 n6 begin - - c1.1 - Txn\n5 n6 finish - - c1.1 slow aborted(conflict)\n";
        let aborted = listing(trace);
        assert_eq!(aborted.in_order()[0].latency(), Some(Duration::from_nanos(4)));
        let retried = listing(&format!("{trace}6 n6 begin - - c1.1#1 - Txn\n"));
        let [txn] = retried.in_order()[..] else { panic!("{retried:?}") };
        assert_eq!((txn.attempts, txn.end.clone()), (2, None));
        // A late answer to the first attempt does not end the second.
        let late = listing(&format!(
            "{trace}6 n6 begin - - c1.1#1 - Txn\n7 n6 finish - - c1.1 slow aborted(conflict)\n"
        ));
        assert_eq!(late.in_order()[0].end, None);
    }

    #[test]
    fn transactions_are_in_the_order_in_which_they_began() {
        let trace =
            "3 n6 begin - - c9.1 - Txn\n4 n5 begin - - c1.1 - Txn\n4 n1 recv n6 2 c2.7 Ask Ask\n";
        let listing = listing(trace);
        let names: Vec<String> = listing.in_order().iter().map(|row| row.txn.to_string()).collect();
        assert_eq!(names, ["c2.7", "c9.1", "c1.1"]);
    }
}
