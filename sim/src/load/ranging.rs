//! What clients check of scans and watches, in simulations and of real clusters.

use std::ops::Bound;

use orthodrome_core::id::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{KeyRange, Page, Scan};
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Key, Reads};
use orthodrome_core::watch::{Batch, Change};

/// The keys that a scan found, and as absent keys all other keys in the page's range that
/// transactions of this run may have written.
#[must_use]
pub fn found(scan: &Scan, page: &Page, reads: &Reads, written: &OrdSet<Key>) -> Reads {
    let mut all: Reads = page.rows.iter().cloned().collect();
    let covered = covered(scan, page);
    if covered.is_empty() {
        return all;
    }
    let end = covered.until.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
    for key in written.range::<Key, _>((Bound::Included(&covered.from), end)) {
        let absent = || reads.get(key).filter(|read| read.value.is_none()).cloned();
        all.entry(key.clone()).or_insert_with(|| absent().unwrap_or_default());
    }
    all
}

/// The range of a page: the range of the scan without the rest.
fn covered(scan: &Scan, page: &Page) -> KeyRange {
    let KeyRange { from, until } = scan.range.clone();
    match &page.rest {
        None => KeyRange { from, until },
        Some(rest) if scan.backwards => {
            KeyRange { from: rest.until.clone().unwrap_or_default(), until }
        }
        Some(rest) => KeyRange { from, until: Some(rest.from.clone()) },
    }
}

/// Checks the form of a page.
///
/// # Errors
/// A key that does not belong there, or too many.
pub fn judge_page(scan: &Scan, page: &Page) -> Result<(), String> {
    let (covered, limit) = (covered(scan, page), scan.limit);
    let keys: Vec<&Key> = page.rows.iter().map(|(key, _)| key).collect();
    let in_order = |pair: &[&Key]| match pair {
        [left, right] => {
            if scan.backwards {
                left > right
            } else {
                left < right
            }
        }
        _ => true,
    };
    let stray = keys.iter().find(|key| !covered.contains(key) || !scan.range.contains(key));
    if let Some(stray) = stray {
        return Err(format!("a scan of {scan:?} returned {stray}, which is not in {covered:?}"));
    }
    if keys.len() > limit || !keys.windows(2).all(in_order) {
        return Err(format!(
            "a scan of {scan:?} returned a wrong number or order of keys: {keys:?}"
        ));
    }
    Ok(())
}

/// What the watches of one client have shown, one after the other.
#[derive(Clone, Debug)]
pub struct Watched {
    range: KeyRange,
    /// They began here.
    from: Timestamp,
    /// Everything up to here was shown.
    through: Timestamp,
    /// The changes, and whether they deleted the key.
    changes: Committed,
}

/// Acknowledged changes: who made them, and whether they deleted the key.
pub type Committed = OrdMap<(Timestamp, Key), (TxnId, bool)>;

impl Watched {
    /// A watch of this range begins after `from`.
    #[must_use]
    pub fn new(range: KeyRange, from: Timestamp) -> Self {
        Self { range, from, through: from, changes: OrdMap::new() }
    }

    /// The number of changes that were shown.
    #[must_use]
    pub fn len(&self) -> usize {
        self.changes.len()
    }

    /// True if nothing was shown.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
    }

    /// The range.
    #[must_use]
    pub fn range(&self) -> &KeyRange {
        &self.range
    }

    /// Everything up to here was shown.
    #[must_use]
    pub fn through(&self) -> Timestamp {
        self.through
    }

    /// Checks the next batch against acknowledged changes, and takes it.
    ///
    /// # Errors
    /// A change that does not belong there, or one that is missing.
    pub fn take(&mut self, batch: Batch, committed: &Committed) -> Result<(), String> {
        let Batch { changes, through } = batch;
        let before = self.through;
        if through <= before {
            return Err(format!("a watch went from {before} back to {through}"));
        }
        let mut last = None;
        for Change { key, version, value } in changes {
            let place = (version, key.clone());
            let (at, is_there) = (version.timestamp, value.is_some());
            let is_in_order = last.replace(place.clone()).is_none_or(|last| last < place);
            if !is_in_order || at <= before || through < at || !self.range.contains(&key) {
                return Err(format!(
                    "a watch of {:?} from {before} to {through} showed {key} at {at}, which does \
                     not belong there",
                    self.range
                ));
            }
            self.changes.insert((at, key), (version.writer, !is_there));
        }
        self.through = through;
        let new = (before.next(), Key::default())..(through.next(), Key::default());
        for ((at, key), (txn, deleted)) in committed.range(new) {
            self.check(*at, key, *txn, *deleted)?;
        }
        Ok(())
    }

    /// Checks that an acknowledged change was shown, if it should have been.
    ///
    /// # Errors
    /// It was not.
    pub fn check(&self, at: Timestamp, key: &Key, txn: TxnId, deleted: bool) -> Result<(), String> {
        if at <= self.from || self.through < at || !self.range.contains(key) {
            return Ok(());
        }
        let shown = self.changes.get(&(at, key.clone()));
        if shown == Some(&(txn, deleted)) {
            return Ok(());
        }
        let Self { from, through, .. } = self;
        Err(format!(
            "a watch from {from} to {through} showed {shown:?} instead of the change of {key} at {at} \
             by {txn}, which was acknowledged"
        ))
    }
}
