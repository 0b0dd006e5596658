//! The deterministic scheduler (Calvin §3.2, Sloth ch. 3). Locks are granted in the order of the
//! merge, so every region runs conflicting transactions in that order, and transactions without
//! conflicts run in parallel.
//!
//! All transactions whose turn has come are scheduled together. A transaction requests all its
//! locks at once, in the order of the merge, and keeps them until it has run. So the waits are
//! known beforehand, and no queue is needed: a transaction runs in the *round* after the last round
//! of the transactions for which it must wait. No two transactions of one round share a key that
//! either writes. Workers run a round in parallel; rounds follow each other.

use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::is_fence;
use orthodrome_core::txn::Key;

/// The rounds after which a key's locks are free.
#[derive(Clone, Copy, Debug, Default)]
struct Lock {
    /// After the last writer.
    to_read: usize,
    /// After the last writer and all later readers.
    to_write: usize,
}

/// The rounds in which transactions with these read and write keys run. They are given, and named,
/// by their positions in the order of the merge.
pub fn rounds<'a>(order: impl Iterator<Item = (&'a [Key], &'a [Key])>) -> Vec<Vec<usize>> {
    let mut locks: OrdMap<&Key, Lock> = OrdMap::new();
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (place, (reads, writes)) in order.enumerate() {
        let lock = |key| locks.get(key).copied().unwrap_or_default();
        let to_read = reads.iter().map(|key| match lock(key) {
            Lock { to_write, .. } if is_fence(key) => to_write,
            Lock { to_read, .. } => to_read,
        });
        let to_write = writes.iter().map(|key| lock(key).to_write);
        let round = to_read.chain(to_write).max().unwrap_or(0);
        for key in reads {
            let lock = locks.entry(key).or_default();
            lock.to_write = lock.to_write.max(round + 1);
        }
        for key in writes {
            locks.insert(key, Lock { to_read: round + 1, to_write: round + 1 });
        }
        if rounds.len() == round {
            rounds.push(Vec::new());
        }
        if let Some(round) = rounds.get_mut(round) {
            round.push(place);
        }
    }
    rounds
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(order: &[(&str, &str)]) -> Vec<Vec<usize>> {
        let keys = |text: &str| text.split_terminator(' ').map(Key::from).collect::<Vec<_>>();
        let order: Vec<_> =
            order.iter().map(|(reads, writes)| (keys(reads), keys(writes))).collect();
        rounds(order.iter().map(|(reads, writes)| (&reads[..], &writes[..])))
    }

    #[test]
    fn what_conflicts_runs_in_order_and_the_rest_at_once() {
        assert_eq!(of(&[]), Vec::<Vec<usize>>::new());
        assert_eq!(of(&[("", "a"), ("", "b"), ("c", "c")]), [[0, 1, 2]]);
        assert_eq!(of(&[("a", "a"), ("a", "a"), ("a", "a")]), [[0], [1], [2]]);
        // Readers share; a writer waits for all of them, and later readers wait for the writer.
        assert_eq!(
            of(&[("a", ""), ("a", ""), ("", "a"), ("a", "")]),
            [vec![0, 1], vec![2], vec![3]]
        );
        // A transaction whose locks are free does not wait for earlier ones that wait.
        assert_eq!(
            of(&[("", "a"), ("a", "b"), ("", "c"), ("c", "b")]),
            [vec![0, 2], vec![1], vec![3]]
        );
        // A blind write waits for earlier readers and writers.
        assert_eq!(of(&[("a", ""), ("", "a"), ("", "a")]), [[0], [1], [2]]);
    }
}
