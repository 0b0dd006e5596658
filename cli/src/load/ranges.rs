//! Scans and watches of a load, and what is checked of them: a scan is a transaction that has read all
//! keys of its page, the absent ones too; a watch shows each acknowledged change of its range, once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use orthodrome_client::{Change, Changes, Error, KeyRange};
use orthodrome_core::TxnId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::scan::{Page, Scan};
use orthodrome_core::time::{Time, Timestamp, nanos};
use orthodrome_core::txn::{Key, Outcome, Read, Reads};
use orthodrome_core::watch::Batch;
use orthodrome_eval::record::{Attempt, entry};
use orthodrome_eval::workload::{Ranging, Request};
use orthodrome_sim::load::ranging::{Committed, Watched, found, judge_page};

use super::client::{LoadClient, prefixed};
use super::driver::{Shared, Source};
use super::results::{Commit, Ended, Failed};

/// The numbers of scans in histories begin here: far above those of transactions.
const SCANS_FROM: u64 = 1 << 40;

/// What the clients know together.
#[derive(Debug, Default)]
pub struct Ranges(Mutex<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Keys that transactions of this run may have written.
    written: OrdSet<Key>,
    /// Acknowledged changes.
    committed: Committed,
    /// All watches.
    watches: Vec<Arc<Mutex<Watched>>>,
    scans: u64,
}

fn lock<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Ranges {
    /// These keys may be written from now on.
    pub fn will_write(&self, keys: &[Key]) {
        lock(&self.0).written.extend(keys.iter().cloned());
    }

    /// A transaction was acknowledged, which wrote these keys; true stands for a deletion.
    pub fn committed(&self, at: Timestamp, txn: TxnId, written: OrdMap<Key, bool>) {
        let mut known = lock(&self.0);
        for (key, deleted) in written {
            known.committed.insert((at, key), (txn.name(), deleted));
        }
    }

    /// The first acknowledged change that a watch should have shown, and has not.
    pub fn first_missing(&self) -> Option<String> {
        let known = lock(&self.0);
        let missing = known.watches.iter().flat_map(|watched| {
            let watched = lock(watched);
            let changes = known.committed.iter();
            let checked =
                changes.map(|((at, key), &(txn, deleted))| watched.check(*at, key, txn, deleted));
            checked.filter_map(Result::err).next()
        });
        missing.into_iter().next()
    }

    /// How many watches there were, and what they have shown.
    pub fn shown(&self) -> (usize, usize) {
        let known = lock(&self.0);
        let shown = known.watches.iter().map(|watched| lock(watched).len()).sum();
        (known.watches.len(), shown)
    }
}

impl LoadClient {
    /// Runs a scan, or watches.
    pub(super) async fn range(
        &mut self,
        shared: &Shared,
        source: &Source,
        (request, ranging): (&Request, &Ranging),
        arrived: Instant,
    ) -> Ended {
        let home = self.issuer.region;
        let mut ended = Ended {
            home,
            priority: request.priority,
            result: Ok(Commit {
                latency: arrived.elapsed(),
                floor: shared.floor(home, request),
                name: request.name,
                reach: shared.reach(home, request),
                is_watch: request.is_watch(),
            }),
            reads: None,
            aborts: Vec::new(),
            entries: Vec::new(),
            findings: Vec::new(),
        };
        let done = match ranging {
            Ranging::Scan(scan) => self.scan(shared, source, (request, scan), &mut ended).await,
            Ranging::Watch(range, batches) => {
                self.watch(shared, (range, *batches), &mut ended).await
            }
        };
        match (done, &mut ended.result) {
            (Err(error), result) => *result = Err(Failed::Aborted(error.to_string())),
            (Ok(()), Ok(commit)) => commit.latency = arrived.elapsed(),
            (Ok(()), Err(_)) => {}
        }
        ended
    }

    async fn scan(
        &self,
        shared: &Shared,
        source: &Source,
        (request, scan): (&Request, &Scan),
        ended: &mut Ended,
    ) -> Result<(), Error> {
        let prefix = &shared.prefix;
        let range = moved(prefix, &scan.range);
        let began = Instant::now();
        let mut asked = self.client.scan(range.clone()).priority(request.priority);
        asked = asked.limit(u32::try_from(scan.limit).unwrap_or(u32::MAX));
        let page = if scan.backwards { asked.backwards() } else { asked }.await?;
        let read = |row: orthodrome_client::Row| {
            (strip(prefix, &row.key), Read { value: row.value, version: row.version })
        };
        let rest = page.rest.map(|rest| KeyRange {
            from: if rest.from == range.from {
                scan.range.from.clone()
            } else {
                strip(prefix, &rest.from)
            },
            until: if rest.until == range.until {
                scan.range.until.clone()
            } else {
                rest.until.map(|until| strip(prefix, &until))
            },
        });
        let (rows, timestamp) = (page.rows.into_iter().map(read).collect(), page.timestamp);
        let page = Page { rows, rest, timestamp };
        let (reads, number) = {
            let mut known = lock(&shared.ranges.0);
            known.scans += 1;
            (found(scan, &page, &Reads::new(), &known.written), known.scans)
        };
        ended.findings.extend(judge_page(scan, &page).err());
        let txn = TxnId::new(self.issuer.client, SCANS_FROM + number);
        let keys = reads.keys().cloned().collect();
        let request = Request { reads: keys, ..request.clone() };
        if let Err(finding) = source.audit(&request, &reads) {
            ended.findings.push(format!("scan {txn}: {finding}"));
        }
        let time = |at: Instant| Time(nanos(at.saturating_duration_since(shared.started)));
        let attempt = Attempt {
            request: &request,
            txn,
            region: shared.region_name(ended.home),
            invoked: time(began),
            completed: Some((time(Instant::now()), Outcome::Committed(timestamp))),
            reads: Some(&reads),
            decision: None,
            is_retried: false,
        };
        match entry(&attempt, source.values) {
            Ok(entry) => ended.entries.push(entry),
            Err(broken) => ended.findings.push(broken.to_string()),
        }
        ended.reads = Some(reads);
        Ok(())
    }

    /// Watches from where the last watch of this client has ended, until it has shown so many batches and
    /// what was acknowledged when it began.
    async fn watch(
        &mut self,
        shared: &Shared,
        (range, batches): (&KeyRange, u32),
        ended: &mut Ended,
    ) -> Result<(), Error> {
        let prefix = &shared.prefix;
        let goal = lock(&shared.ranges.0).committed.last_key_value().map(|((at, _), _)| *at);
        let goal = goal.unwrap_or_default();
        let before = self.watched.as_ref().map(|watched| {
            let watched = lock(watched);
            (watched.range().clone(), watched.through())
        });
        let range = before.as_ref().map_or(range, |(range, _)| range).clone();
        let mut watch = self.client.watch(moved(prefix, &range));
        if let Some((_, through)) = before {
            watch = watch.after(through);
        }
        let mut left = batches;
        loop {
            let Changes { changes, through } = match watch.next().await {
                Ok(changes) => changes,
                Err(error) => {
                    if let Error::Forgotten(_) = error {
                        // The next watch begins from then on.
                        self.watched = None;
                    }
                    return Err(error);
                }
            };
            left = left.saturating_sub(1);
            let strip = |change: Change| Change { key: strip(prefix, &change.key), ..change };
            let changes = changes.into_iter().map(strip).collect();
            let known = &mut *lock(&shared.ranges.0);
            match &self.watched {
                None => {
                    let watched = Arc::new(Mutex::new(Watched::new(range.clone(), through)));
                    known.watches.push(Arc::clone(&watched));
                    self.watched = Some(watched);
                }
                // It says how far it has come, although it is no further.
                Some(watched) if lock(watched).through() >= through => {}
                Some(watched) => {
                    let taken = lock(watched).take(Batch { changes, through }, &known.committed);
                    ended.findings.extend(taken.err());
                }
            }
            if left == 0 && through >= goal {
                return Ok(());
            }
        }
    }
}

/// The range of this run's keys.
fn moved(prefix: &str, range: &KeyRange) -> KeyRange {
    let KeyRange { from, until } = range;
    let until = match until {
        Some(until) => Some(prefixed(prefix, until)),
        None => KeyRange::prefix(prefix.as_bytes()).until,
    };
    KeyRange { from: prefixed(prefix, from), until }
}

fn strip(prefix: &str, key: &Key) -> Key {
    let rest = key.bytes().strip_prefix(prefix.as_bytes());
    Key::from(rest.unwrap_or(key.bytes()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_without_an_end_end_with_the_keys_of_the_run() {
        let whole = moved("load-c4/", &KeyRange::default());
        assert_eq!(whole, KeyRange::prefix(b"load-c4/"));
        assert!(whole.contains(&prefixed("load-c4/", &"k1".into())));
        assert_eq!(moved("", &KeyRange::default()), KeyRange::default());
        let range = KeyRange { from: "a".into(), until: Some("b".into()) };
        let expected = KeyRange { from: "x/a".into(), until: Some("x/b".into()) };
        assert_eq!(moved("x/", &range), expected);
        assert_eq!(strip("x/", &"x/a".into()), "a".into());
    }

    #[test]
    fn a_change_that_a_watch_has_passed_and_not_shown_is_found() {
        let ranges = Ranges::default();
        let watched = Watched::new(KeyRange::default(), Timestamp(10));
        let watched = Arc::new(Mutex::new(watched));
        lock(&ranges.0).watches.push(Arc::clone(&watched));
        let txn = TxnId::new(orthodrome_core::ClientId(1), 1);
        ranges.committed(Timestamp(20), txn, OrdMap::from([("a".into(), false)]));
        assert_eq!(ranges.first_missing(), None, "it has not come so far");
        let batch = Batch { changes: Vec::new(), through: Timestamp(30) };
        lock(&watched).take(batch, &Committed::new()).unwrap();
        assert!(ranges.first_missing().is_some_and(|missing| missing.contains("of a at")));
    }
}
