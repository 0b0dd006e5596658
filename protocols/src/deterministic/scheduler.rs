//! The deterministic scheduler (Calvin §3.2, Sloth ch. 3): locks are granted in the order of the merge, so that every
//! region runs what conflicts in that order, and what does not conflict runs at once.
//!
//! Everything whose turn has come is scheduled together. All of a transaction's locks are asked for at once, in the
//! order of the merge, and none is given up before it ran; so who waits for whom is known beforehand, and there is
//! no queue to keep: a transaction runs in the *round* after the last in which one runs that it has to wait for. Those
//! of one round share no key that any of them writes. Workers run them at once; rounds follow each other.

use std::collections::BTreeMap;

use orthodrome_core::txn::Key;

/// When a key's locks are free.
#[derive(Clone, Copy, Debug, Default)]
struct Lock {
    /// After the last writer.
    to_read: usize,
    /// After the last writer and all readers since.
    to_write: usize,
}

/// The rounds in which transactions run that read and write such keys, given in the order of the merge: by their
/// places in that order.
pub fn rounds<'a>(order: impl Iterator<Item = (&'a [Key], &'a [Key])>) -> Vec<Vec<usize>> {
    let mut locks: BTreeMap<&Key, Lock> = BTreeMap::new();
    let mut rounds: Vec<Vec<usize>> = Vec::new();
    for (place, (reads, writes)) in order.enumerate() {
        let lock = |key| locks.get(key).copied().unwrap_or_default();
        let to_read = reads.iter().map(|key| lock(key).to_read);
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
        // Readers share; a writer waits for all of them, and who reads after it for it.
        assert_eq!(
            of(&[("a", ""), ("a", ""), ("", "a"), ("a", "")]),
            [vec![0, 1], vec![2], vec![3]]
        );
        // A free transaction does not wait for those before it that do.
        assert_eq!(
            of(&[("", "a"), ("a", "b"), ("", "c"), ("c", "b")]),
            [vec![0, 2], vec![1], vec![3]]
        );
        // One that writes blindly waits for readers and writers before it.
        assert_eq!(of(&[("a", ""), ("", "a"), ("", "a")]), [[0], [1], [2]]);
    }
}
