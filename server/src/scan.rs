//! Scans and watches at a gateway: drives the machines of [`orthodrome_core::scan`] and
//! [`orthodrome_core::watch`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::scan::{Answer, KeyRange, Page, Scan, ScanError, Scanner, Step};
use orthodrome_core::txn::{AbortReason, Priority};
use orthodrome_core::watch::{self, Batch, WatchError, Watcher};
use orthodrome_core::{Cluster, NodeId, Outcome, RegionId, Time, Timestamp};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use crate::gateway::{Backend, Gateway, GatewayError};
use crate::own_txns::OwnTxns;

/// The number of scans at one gateway at the same time.
const SCANS_MAX: usize = 64;
/// The number of watches at one gateway at the same time.
const WATCHES_MAX: usize = 256;
/// How long a scan may take: many times as long as one without faults.
const SCAN_WITHIN: Duration = Duration::from_secs(30);

/// The answers of servers to one scan.
pub(crate) type Answers = mpsc::Receiver<(NodeId, Answer)>;

/// The batches of a watch. An error is the last one.
pub type Batches = mpsc::Receiver<Result<Batch, ScanFailed>>;

/// A scan or a watch that has begun.
#[derive(Debug)]
pub(crate) struct Subscription {
    /// Its number in this process.
    pub(crate) number: u64,
    pub(crate) cluster: Arc<Cluster>,
    /// See [`orthodrome_core::Protocol::SHARES`].
    pub(crate) has_shares: bool,
    /// The region of the gateway.
    pub(crate) home: RegionId,
    pub(crate) answers: Answers,
}

/// The number of batches of a watch that wait for its client. The watch waits then, too.
const BATCHES_MAX: usize = 4;

/// Why a scan has no result, or a watch ended. It never has an effect.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScanFailed {
    /// The gateway did not run its reads.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// The scan itself failed.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The watch itself failed.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// The protocol cannot scan.
    #[error("the protocol of this cluster cannot scan or watch ranges of keys")]
    Unsupported,
    /// A node has an earlier version.
    #[error("{0} runs an earlier version, which cannot scan or watch; upgrade it first")]
    Older(NodeId),
    /// Servers did not answer in time.
    #[error(
        "too few servers listed their keys within {} s; `status` in the shell shows which nodes are down",
        SCAN_WITHIN.as_secs()
    )]
    Late,
    /// Too many scans at once.
    #[error("{SCANS_MAX} scans run at this gateway, which is the limit; try again later")]
    Overloaded,
    /// Too many watches at once.
    #[error("{WATCHES_MAX} watches run at this gateway, which is the limit; try another one")]
    TooManyWatches,
}

/// The places for scans and watches at one gateway.
#[derive(Debug)]
pub(crate) struct Scans {
    places: Arc<Semaphore>,
    watches: Arc<Semaphore>,
}

impl Default for Scans {
    fn default() -> Self {
        Self {
            places: Arc::new(Semaphore::new(SCANS_MAX)),
            watches: Arc::new(Semaphore::new(WATCHES_MAX)),
        }
    }
}

/// Ends a subscription when it is dropped.
struct Subscribed<'a>(&'a dyn Backend, u64);

impl Drop for Subscribed<'_> {
    fn drop(&mut self) {
        self.0.unsubscribe(self.1);
    }
}

impl Gateway {
    /// Scans a range of keys: one page, as one consistent snapshot.
    ///
    /// # Errors
    /// See [`ScanFailed`]; a scan has no effect.
    pub async fn scan(&self, scan: Scan, priority: Priority) -> Result<Page, ScanFailed> {
        self.scan_or_list(scan, priority, false).await
    }

    /// Lists the keys of a range, without a transaction: see [`Scanner::names_only`].
    pub(crate) async fn list(&self, scan: Scan) -> Result<Page, ScanFailed> {
        self.scan_or_list(scan, Priority::LOW, true).await
    }

    async fn scan_or_list(
        &self,
        scan: Scan,
        priority: Priority,
        names_only: bool,
    ) -> Result<Page, ScanFailed> {
        let place = self.scans().places.clone().try_acquire_owned();
        let _place = place.map_err(|_| ScanFailed::Overloaded)?;
        let scanned = self.drive_scan(scan, priority, names_only);
        tokio::time::timeout(SCAN_WITHIN, scanned).await.unwrap_or(Err(ScanFailed::Late))
    }

    /// Watches a range of keys: all changes after `after` (none: from now on), in the order of their
    /// commit timestamps. An error is the last result. Whoever drops the receiver ends the watch.
    ///
    /// # Errors
    /// See [`ScanFailed`].
    pub fn watch(&self, range: KeyRange, after: Option<Timestamp>) -> Result<Batches, ScanFailed> {
        let place = self.scans().watches.clone().try_acquire_owned();
        let place = place.map_err(|_| ScanFailed::TooManyWatches)?;
        let subscription = self.backend().subscribe()?;
        let (batches, receiver) = mpsc::channel(BATCHES_MAX);
        let gateway = self.clone();
        tokio::spawn(async move {
            let _place = place;
            let _subscribed = Subscribed(gateway.backend(), subscription.number);
            let watching = gateway.drive_watch(subscription, (range, after), &batches);
            tokio::select! {
                ended = watching => if let Err(failed) = ended {
                    // Nobody listens any more, if this fails.
                    let _ = batches.send(Err(failed)).await;
                },
                () = batches.closed() => {}
            }
        });
        Ok(receiver)
    }

    async fn drive_watch(
        &self,
        subscription: Subscription,
        watched: (KeyRange, Option<Timestamp>),
        batches: &mpsc::Sender<Result<Batch, ScanFailed>>,
    ) -> Result<(), ScanFailed> {
        let Subscription { number, cluster, has_shares, home, mut answers } = subscription;
        let priority = Priority::LOW;
        let mut reader = OwnTxns::new(self, priority);
        let now = clock();
        let (mut watcher, steps) = Watcher::new(&cluster, has_shares, home, watched, now())?;
        let mut steps = VecDeque::from(steps);
        loop {
            while let Some(step) = steps.pop_front() {
                match step {
                    watch::Step::Ask(to, ask) => self.backend().ask(number, to, ask),
                    watch::Step::Read(keys) => {
                        let outcome = match reader.read(keys).await {
                            Ok(finished) => finished.outcome,
                            Err(
                                GatewayError::Overloaded { .. }
                                | GatewayError::OverloadedBytes { .. },
                            ) => Outcome::Aborted(AbortReason::Overload),
                            Err(error) => return Err(error.into()),
                        };
                        steps.extend(match outcome {
                            Outcome::Committed(at) => watcher.on_read(at, now()),
                            Outcome::Aborted(reason) => watcher.on_aborted(reason, now()),
                            // It had no effect, whatever became of it.
                            Outcome::Unknown => watcher.on_aborted(AbortReason::Recovery, now()),
                        });
                    }
                    watch::Step::Batch(batch) => {
                        if batches.send(Ok(batch)).await.is_err() {
                            return Ok(());
                        }
                    }
                    watch::Step::Failed(error) => return Err(error.into()),
                }
            }
            let again = watcher.deadline().unwrap_or(Time::MAX).since(now());
            tokio::select! {
                answer = answers.recv() => {
                    let Some((from, answer)) = answer else { return Err(ScanFailed::Late) };
                    steps.extend(watcher.on_answer(from, answer, now()));
                }
                () = tokio::time::sleep(again) => {
                    steps.extend(watcher.on_time(now()));
                }
            }
        }
    }

    async fn drive_scan(
        &self,
        scan: Scan,
        priority: Priority,
        names_only: bool,
    ) -> Result<Page, ScanFailed> {
        let backend = self.backend();
        let Subscription { number, cluster, has_shares, home, mut answers } =
            backend.subscribe()?;
        let _subscribed = Subscribed(backend, number);
        let mut reader = OwnTxns::new(self, priority);
        let now = clock();
        let (mut scanner, steps) = Scanner::new(&cluster, has_shares, home, scan, now())?;
        if names_only {
            scanner.names_only();
        }
        let mut steps = VecDeque::from(steps);
        loop {
            while let Some(step) = steps.pop_front() {
                match step {
                    Step::Ask(to, ask) => backend.ask(number, to, ask),
                    Step::Read(keys) => {
                        let finished = reader.read_fenced(keys, Some(scanner.part())).await?;
                        steps.extend(match finished.outcome {
                            Outcome::Committed(at) => {
                                scanner.on_read(finished.reads.unwrap_or_default(), at, now())
                            }
                            Outcome::Aborted(reason) => scanner.on_aborted(reason),
                            // It had no effect, whatever became of it.
                            Outcome::Unknown => scanner.on_aborted(AbortReason::Recovery),
                        });
                    }
                    Step::Done(result) => return Ok(result?),
                }
            }
            let again = scanner.deadline().unwrap_or(Time::MAX).since(now());
            tokio::select! {
                answer = answers.recv() => {
                    let Some((from, answer)) = answer else { return Err(ScanFailed::Late) };
                    steps.extend(scanner.on_answer(from, answer, now()));
                }
                () = tokio::time::sleep(again) => {
                    steps.extend(scanner.on_time(now()));
                }
            }
        }
    }
}

/// The time since now.
fn clock() -> impl Fn() -> Time {
    let start = Instant::now();
    move || Time(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX))
}
