//! The white-box checker of outcomes that clients received: each attempt has one outcome, no effect
//! of an acknowledged abort is seen later, and no acknowledged write is lost.

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Outcome, Reads, Version};
use orthodrome_eval::workload::{Values, list_elements};

/// Remembers everything that clients received. Its size grows with the run, so long measurements do
/// not use it.
#[derive(Debug)]
pub struct Oracle {
    values: Values,
    outcomes: OrdMap<TxnId, Outcome>,
    /// Writers whose versions committed transactions read, with the timestamp and one reader.
    seen: OrdMap<TxnId, (Timestamp, TxnId)>,
    /// The newest acknowledged version of each key, and whether it deleted the key.
    newest: OrdMap<Key, (Version, bool)>,
    /// Keys that transactions without outcome may have deleted.
    maybe_deleted: OrdMap<Key, OrdSet<TxnId>>,
    /// Every acknowledged element of each list.
    appended: OrdMap<Key, OrdSet<u64>>,
    touched: OrdSet<Key>,
}

impl Oracle {
    /// An oracle for a workload with this kind of values.
    #[must_use]
    pub fn new(values: Values) -> Self {
        Self {
            values,
            outcomes: OrdMap::new(),
            seen: OrdMap::new(),
            newest: OrdMap::new(),
            maybe_deleted: OrdMap::new(),
            appended: OrdMap::new(),
            touched: OrdSet::new(),
        }
    }

    /// A client received `outcome`.
    ///
    /// # Errors
    /// If it contradicts an earlier observation.
    pub fn told(&mut self, txn: TxnId, outcome: Outcome) -> Result<(), String> {
        if outcome == Outcome::Unknown {
            return Ok(());
        }
        if let Some(before) = self.outcomes.insert(txn, outcome)
            && before != outcome
        {
            return Err(format!("{txn}: the client learned {before} first and {outcome} later"));
        }
        match (outcome, self.seen.get(&txn)) {
            (Outcome::Aborted(_), Some((at, reader))) => Err(format!(
                "{txn}: the client learned {outcome}, but {reader} read its write at {at}"
            )),
            (Outcome::Committed(told), Some((at, reader))) if told != *at => Err(format!(
                "{txn}: the client learned {outcome}, but {reader} read its write at {at}"
            )),
            (Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown, _) => Ok(()),
        }
    }

    /// A client received the commit of `txn`, which read `reads` and wrote these keys; true stands
    /// for a deletion. `element` is the element that it appended to each key, if values are lists.
    ///
    /// # Errors
    /// If it contradicts an earlier observation.
    pub fn committed(
        &mut self,
        txn: TxnId,
        at: Timestamp,
        reads: &Reads,
        written: &OrdMap<Key, bool>,
        element: u64,
    ) -> Result<(), String> {
        for (key, read) in reads {
            self.touched.insert(key.clone());
            if read.version.is_unwritten() {
                continue;
            }
            let Version { timestamp, writer } = read.version;
            self.seen.insert(writer, (timestamp, txn));
            match self.outcomes.get(&writer) {
                Some(Outcome::Committed(told)) if *told == timestamp => {}
                None | Some(Outcome::Unknown) => {}
                Some(told @ (Outcome::Committed(_) | Outcome::Aborted(_))) => {
                    return Err(format!(
                        "{txn} read {key} as {writer} wrote it at {timestamp}, but the client of {writer} learned {told}"
                    ));
                }
            }
        }
        for (key, deleted) in written {
            self.touched.insert(key.clone());
            let newest = self.newest.entry(key.clone()).or_default();
            *newest = (*newest).max((Version { timestamp: at, writer: txn }, *deleted));
            if self.values == Values::Lists {
                self.appended.entry(key.clone()).or_default().insert(element);
            }
        }
        Ok(())
    }

    /// A transaction that may have deleted these keys ended without outcome.
    pub fn may_delete(&mut self, txn: TxnId, keys: Vec<Key>) {
        for key in keys {
            self.maybe_deleted.entry(key).or_default().insert(txn);
        }
    }

    /// True if a transaction of which no outcome was known at first may have deleted the key after this
    /// version: not if it aborted, or if a reader has seen that it committed earlier.
    fn may_be_deleted_after(&self, key: &Key, version: Version) -> bool {
        let is_later = |txn: &TxnId| {
            let told = self.outcomes.get(txn).copied().unwrap_or(Outcome::Unknown);
            match (told, self.seen.get(txn).copied()) {
                (Outcome::Aborted(_), _) => false,
                (Outcome::Committed(at), _) | (Outcome::Unknown, Some((at, _))) => {
                    at > version.timestamp
                }
                (Outcome::Unknown, None) => true,
            }
        };
        self.maybe_deleted.get(key).is_some_and(|txns| txns.iter().any(is_later))
    }

    /// The latest timestamp of an acknowledged write.
    pub fn latest(&self) -> Timestamp {
        let times = self.newest.values().map(|(version, _)| version.timestamp);
        times.max().unwrap_or_default()
    }

    /// Every key that a committed transaction accessed.
    pub fn keys(&self) -> impl Iterator<Item = &Key> {
        self.touched.iter()
    }

    /// Checks the reads of a transaction that began after all others had ended.
    ///
    /// # Errors
    /// If an acknowledged write is missing.
    pub fn judge_final(&self, reads: &Reads) -> Result<(), String> {
        for (key, read) in reads {
            let is_absent = |newest: Version, deleted: bool| {
                // A database may forget that a key was deleted.
                let is_forgotten = read.value.is_none() && read.version.is_unwritten();
                is_forgotten && (deleted || self.may_be_deleted_after(key, newest))
            };
            if let Some((newest, deleted)) = self.newest.get(key)
                && (read.version.is_unwritten() || read.version.timestamp < newest.timestamp)
                && !is_absent(*newest, *deleted)
            {
                return Err(format!(
                    "lost write: the write of {key} by {newest} was acknowledged, but at the end the key has version {}",
                    read.version
                ));
            }
            let Some(appended) = self.appended.get(key) else { continue };
            let held = list_elements(read.value.as_ref()).ok_or_else(|| {
                format!("the value of {key} at the end is not a list: {:?}", read.value)
            })?;
            if let Some(lost) = appended.iter().find(|element| !held.contains(element)) {
                return Err(format!(
                    "lost write: {lost} was appended to {key} and acknowledged, but at the end {key} is {held:?}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::id::ClientId;
    use orthodrome_core::txn::{AbortReason, Read, Value};

    fn txn(counter: u64) -> TxnId {
        TxnId::new(ClientId(1), counter)
    }

    fn saw(writer: u64, at: u64, elements: &[u64]) -> Reads {
        let bytes: Vec<u8> = elements.iter().flat_map(|element| element.to_le_bytes()).collect();
        let version = Version { timestamp: Timestamp(at), writer: txn(writer) };
        [(Key::from("k"), Read { value: Some(Value::from(bytes)), version })].into()
    }

    #[test]
    fn an_attempt_has_one_outcome() {
        let mut oracle = Oracle::new(Values::Versions);
        oracle.told(txn(1), Outcome::Unknown).unwrap();
        oracle.told(txn(1), Outcome::Committed(Timestamp(5))).unwrap();
        oracle.told(txn(1), Outcome::Committed(Timestamp(5))).unwrap();
        for other in [Outcome::Committed(Timestamp(6)), Outcome::Aborted(AbortReason::Conflict)] {
            assert!(oracle.told(txn(1), other).unwrap_err().contains("c1.1: the client learned"));
        }
    }

    #[test]
    fn a_read_of_an_aborted_write_is_found_in_any_order() {
        let none = OrdMap::new();
        let aborted = Outcome::Aborted(AbortReason::Conflict);
        let mut oracle = Oracle::new(Values::Versions);
        oracle.told(txn(1), aborted).unwrap();
        let read = oracle.committed(txn(2), Timestamp(9), &saw(1, 5, &[]), &none, 0);
        assert!(read.unwrap_err().contains("the client of c1.1 learned aborted"));
        let mut oracle = Oracle::new(Values::Versions);
        oracle.committed(txn(2), Timestamp(9), &saw(1, 5, &[]), &none, 0).unwrap();
        assert!(oracle.told(txn(1), aborted).unwrap_err().contains("c1.2 read its write"));
        // A version must not be read under another timestamp than the acknowledged one.
        let mut oracle = Oracle::new(Values::Versions);
        oracle.committed(txn(2), Timestamp(9), &saw(1, 5, &[]), &none, 0).unwrap();
        assert!(oracle.told(txn(1), Outcome::Committed(Timestamp(6))).is_err());
    }

    #[test]
    fn a_deletion_that_was_seen_before_a_write_does_not_excuse_its_loss() {
        let (k, written) = (Key::from("k"), OrdMap::from([(Key::from("k"), false)]));
        let absent = Reads::from([(k.clone(), Read::default())]);
        let mut oracle = Oracle::new(Values::Versions);
        oracle.may_delete(txn(1), vec![k.clone()]);
        oracle.committed(txn(3), Timestamp(7), &Reads::new(), &written, 0).unwrap();
        oracle.judge_final(&absent).unwrap();
        // Somebody reads the version that the deletion left.
        let version = Version { timestamp: Timestamp(5), writer: txn(1) };
        let saw = Reads::from([(k, Read { value: None, version })]);
        oracle.committed(txn(2), Timestamp(6), &saw, &OrdMap::new(), 0).unwrap();
        let lost = oracle.judge_final(&absent).unwrap_err();
        assert!(lost.contains("by c1.3@7 was acknowledged, but"), "{lost}");
    }

    #[test]
    fn a_lost_acknowledged_write_is_found_at_the_end() {
        let written = OrdMap::from([(Key::from("k"), false)]);
        let mut oracle = Oracle::new(Values::Lists);
        for (counter, element) in [(1, 11), (2, 12)] {
            let at = Timestamp(counter);
            oracle.committed(txn(counter), at, &Reads::new(), &written, element).unwrap();
        }
        assert_eq!(oracle.keys().count(), 1);
        oracle.judge_final(&saw(2, 2, &[11, 12])).unwrap();
        let older = oracle.judge_final(&saw(1, 1, &[11])).unwrap_err();
        assert!(older.contains("by c1.2@2 was acknowledged, but"), "{older}");
        let gap = oracle.judge_final(&saw(2, 2, &[12])).unwrap_err();
        assert!(gap.contains("11 was appended to k and acknowledged"), "{gap}");
    }
}
