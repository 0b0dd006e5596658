//! Results of a run: latencies, counts, the history, and broken promises.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use orthodrome_core::RegionId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::{AbortReason, Priority, Reads};
use orthodrome_eval::history::{Entry, Writer};
use orthodrome_eval::metrics::{Counters, Latencies, Summary};
use orthodrome_eval::workload::Reach;

/// Number of seconds that the live view covers.
const WINDOW: usize = 5;
/// Number of broken promises that are kept in full; the rest are counted.
const FINDINGS_MAX: usize = 8;

/// All reports of clients, in bounded memory: the history goes to its file.
#[derive(Debug)]
pub struct Results {
    /// Latencies of committed requests.
    pub latencies: Latencies,
    /// Counts.
    pub counters: Counters,
    /// Requests of unknown outcome.
    pub unknown: u64,
    /// Requests that were refused because every client was busy.
    pub shed: u64,
    findings: Vec<String>,
    findings_more: u64,
    history: Option<Writer<BufWriter<File>>>,
    history_error: Option<io::Error>,
    trouble: Option<String>,
    /// Latencies of the last seconds, one entry for each second, the current second last.
    recent: VecDeque<Latencies>,
    watch: Option<Watch>,
}

/// A watch measures the longest time that a region goes without a commit.
#[derive(Debug)]
struct Watch {
    since: Instant,
    last: OrdMap<RegionId, Instant>,
    longest: Duration,
    committed: u64,
}

/// The results of a watch.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Watched {
    /// The longest time that any watched region went without a commit.
    pub longest_silence: Duration,
    /// Requests committed.
    pub committed: u64,
}

/// A request that has ended.
#[derive(Debug)]
pub struct Ended {
    /// The region in which its last attempt was submitted.
    pub home: RegionId,
    /// Its priority.
    pub priority: Priority,
    /// Its result.
    pub result: Result<Commit, Failed>,
    /// Why its attempts aborted.
    pub aborts: Vec<AbortReason>,
    /// Lines for the history.
    pub entries: Vec<Entry>,
    /// Broken promises that the request found.
    pub findings: Vec<String>,
    /// The reads of its last attempt, if its client received them.
    pub reads: Option<Reads>,
}

/// A request that committed.
#[derive(Clone, Copy, Debug)]
pub struct Commit {
    /// From its arrival until its client received the answer.
    pub latency: Duration,
    /// The latency floor, if it is known.
    pub floor: Option<Duration>,
    /// The name of the workload's transaction.
    pub name: &'static str,
    /// The distance of its data, if it is known.
    pub reach: Option<Reach>,
    /// See [`Request::is_watch`](orthodrome_eval::workload::Request::is_watch).
    pub is_watch: bool,
}

/// A request that did not commit.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Failed {
    /// It had no effect, for this reason.
    Aborted(String),
    /// Its own guard or closure refused it, as the workload intends for some.
    Refused,
    /// The outcome is unknown, for this reason.
    Unknown(String),
}

impl Results {
    /// Results whose history goes to the file at `path`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn create(path: Option<&Path>) -> anyhow::Result<Self> {
        let open = |path: &Path| {
            let file = File::create(path)
                .with_context(|| format!("--history {}: cannot create the file", path.display()))?;
            anyhow::Ok(Writer::new(BufWriter::with_capacity(1 << 18, file)))
        };
        Ok(Self {
            latencies: Latencies::default(),
            counters: Counters::default(),
            unknown: 0,
            shed: 0,
            findings: Vec::new(),
            findings_more: 0,
            history: path.map(open).transpose()?,
            history_error: None,
            trouble: None,
            recent: VecDeque::from([Latencies::default()]),
            watch: None,
        })
    }

    /// Records a request that has just ended.
    pub fn record(&mut self, ended: Ended) {
        let Ended { home, priority, result, aborts, entries, findings, reads: _ } = ended;
        self.counters.offered += 1;
        for reason in aborts {
            *self.counters.aborted.entry(reason).or_default() += 1;
        }
        match result {
            Ok(Commit { latency, name, is_watch: true, .. }) => {
                self.counters.committed += 1;
                self.latencies.record_kind(name, latency);
            }
            Ok(Commit { latency, floor, name, reach, is_watch: false }) => {
                self.counters.committed += 1;
                self.latencies.record(priority, home, latency);
                self.latencies.record_kind(name, latency);
                if let Some(reach) = reach {
                    self.latencies.record_kind(reach.name(), latency);
                }
                if let Some(second) = self.recent.back_mut() {
                    second.record(priority, home, latency);
                }
                if let Some(floor) = floor.filter(|floor| !floor.is_zero()) {
                    let ratio = latency.as_secs_f64() / floor.as_secs_f64();
                    self.counters.floor_ratio_millis.record((ratio * 1_000.0).round() as u64);
                }
                if let Some(watch) = &mut self.watch {
                    watch.commit(home, Instant::now());
                }
            }
            Err(Failed::Aborted(trouble)) => {
                self.counters.failed += 1;
                self.trouble = Some(trouble);
            }
            Err(Failed::Refused) => self.counters.failed += 1,
            Err(Failed::Unknown(trouble)) => {
                self.counters.failed += 1;
                self.unknown += 1;
                self.trouble = Some(trouble);
            }
        }
        self.keep(&entries, findings);
    }

    /// Records lines of the history and findings that belong to no measured request.
    pub fn keep(&mut self, entries: &[Entry], findings: Vec<String>) {
        for entry in entries {
            self.write(entry);
        }
        for finding in findings {
            self.finding(finding);
        }
    }

    /// Records a request that was refused because every client was busy.
    pub fn shed(&mut self) {
        self.counters.offered += 1;
        self.counters.failed += 1;
        self.shed += 1;
    }

    /// Records a broken promise.
    pub fn finding(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        } else {
            self.findings_more += 1;
        }
    }

    /// The broken promises so far.
    pub fn findings(&self) -> Vec<String> {
        let more = (self.findings_more > 0).then(|| format!("and {} more", self.findings_more));
        self.findings.iter().cloned().chain(more).collect()
    }

    /// Records why clients make no progress, to be shown to the user.
    pub fn trouble(&mut self, trouble: String) {
        self.trouble = Some(trouble);
    }

    /// Takes the latest recorded trouble.
    pub fn take_trouble(&mut self) -> Option<String> {
        self.trouble.take()
    }

    fn write(&mut self, entry: &Entry) {
        if self.history_error.is_some() {
            return;
        }
        if let Some(Err(error)) = self.history.as_mut().map(|history| history.write(entry)) {
            self.history_error = Some(error);
        }
    }

    /// Must be called once a second: begins the next second of the live view.
    pub fn tick(&mut self) {
        self.recent.push_back(Latencies::default());
        while self.recent.len() > WINDOW {
            self.recent.pop_front();
        }
    }

    /// Commits a second and latencies in the last seconds, of one region or of all.
    pub fn recent(&self, wanted: impl Fn(Priority, RegionId) -> bool) -> (f64, Summary) {
        let mut all = Latencies::default();
        for second in &self.recent {
            all.merge(second);
        }
        let latency = all.select(wanted);
        (latency.n as f64 / self.recent.len().max(1) as f64, latency)
    }

    /// Starts a watch on these regions.
    pub fn watch(&mut self, regions: impl IntoIterator<Item = RegionId>) {
        let since = Instant::now();
        let last = regions.into_iter().map(|region| (region, since)).collect();
        self.watch = Some(Watch { since, last, longest: Duration::ZERO, committed: 0 });
    }

    /// The time since the watch began and its results so far, if there is one.
    pub fn watched(&self) -> Option<(Duration, Watched)> {
        let watch = self.watch.as_ref()?;
        Some((watch.since.elapsed(), watch.seen(Instant::now())))
    }

    /// Ends the watch and returns its results.
    pub fn end_watch(&mut self) -> Option<Watched> {
        let watch = self.watch.take()?;
        Some(watch.seen(Instant::now()))
    }

    /// Ends the history, so that it can be read.
    ///
    /// # Errors
    /// It could not be written in full.
    pub fn finish_history(&mut self) -> anyhow::Result<()> {
        let written = match (self.history_error.take(), self.history.take()) {
            (Some(error), _) => Err(error),
            (None, Some(history)) => history.finish().map(drop),
            (None, None) => Ok(()),
        };
        written.context("cannot write the history")
    }
}

impl Watch {
    fn commit(&mut self, region: RegionId, now: Instant) {
        self.committed += 1;
        if let Some(last) = self.last.get_mut(&region) {
            self.longest = self.longest.max(now.saturating_duration_since(*last));
            *last = now;
        }
    }

    fn seen(&self, now: Instant) -> Watched {
        let silent = self.last.values().map(|last| now.saturating_duration_since(*last)).max();
        let longest_silence = self.longest.max(silent.unwrap_or_default());
        Watched { longest_silence, committed: self.committed }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_silence_of_any_region_counts_its_end_too() {
        let since = Instant::now();
        let at = |millis| since + Duration::from_millis(millis);
        let regions = [RegionId(0), RegionId(1)];
        let last = regions.into_iter().map(|region| (region, since)).collect();
        let mut watch = Watch { since, last, longest: Duration::ZERO, committed: 0 };
        watch.commit(RegionId(0), at(100));
        watch.commit(RegionId(1), at(700));
        watch.commit(RegionId(2), at(5_000));
        watch.commit(RegionId(0), at(400));
        assert_eq!(watch.seen(at(750)).longest_silence, Duration::from_millis(700));
        assert_eq!(watch.seen(at(1_200)).longest_silence, Duration::from_millis(800));
        assert_eq!(watch.seen(at(750)).committed, 4);
    }

    #[test]
    fn the_live_view_forgets() {
        let mut results = Results::create(None).unwrap();
        let commit = |is_watch| Ended {
            home: RegionId(1),
            priority: Priority::LOW,
            result: Ok(Commit {
                latency: Duration::from_millis(10),
                floor: None,
                name: "test",
                reach: None,
                is_watch,
            }),
            reads: None,
            aborts: vec![AbortReason::Conflict],
            entries: Vec::new(),
            findings: Vec::new(),
        };
        results.record(commit(true));
        assert_eq!(results.recent(|_, _| true).1.n, 0, "the duration of a watch is no latency");
        results.record(commit(false));
        assert_eq!(results.recent(|_, at| at == RegionId(1)).1.n, 1);
        assert_eq!(results.recent(|_, at| at == RegionId(0)).1.n, 0);
        for _ in 0..WINDOW {
            results.tick();
        }
        assert_eq!(results.recent(|_, _| true).1.n, 0);
        assert_eq!(results.latencies.all().n, 1);
        assert_eq!((results.counters.committed, results.counters.aborted_attempts()), (2, 2));
    }

    #[test]
    fn findings_are_bounded() {
        let mut results = Results::create(None).unwrap();
        for number in 0..FINDINGS_MAX + 3 {
            results.finding(number.to_string());
        }
        assert_eq!(results.findings().len(), FINDINGS_MAX + 1);
        assert_eq!(results.findings().last().unwrap(), "and 3 more");
    }
}
