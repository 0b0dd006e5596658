//! Scans at a gateway: drives the scanner of [`orthodrome_core::scan`].

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use orthodrome_core::scan::{Answer, Page, Scan, ScanError, Scanner, Step};
use orthodrome_core::txn::{AbortReason, Priority};
use orthodrome_core::{ClientId, Key, NodeId, Outcome, RegionId, Time, Txn, TxnId};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

use crate::gateway::{Backend, Begun, Finished, Gateway, GatewayError};

/// The number of scans at one gateway at the same time.
const SCANS_MAX: usize = 64;
/// How long a scan may take: many times as long as one without faults.
const SCAN_WITHIN: Duration = Duration::from_secs(30);
/// How long a scan waits before it reads again after a conflict, at first.
const PAUSE: Duration = Duration::from_millis(5);
/// The longest such pause.
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The answers of servers to one scan.
pub(crate) type Answers = mpsc::Receiver<(NodeId, Answer)>;

/// A scan that has begun.
#[derive(Debug)]
pub(crate) struct BegunScan {
    /// Its number in this process.
    pub(crate) number: u64,
    pub(crate) scanner: Scanner,
    /// The region of the gateway.
    pub(crate) home: RegionId,
    /// The first steps.
    pub(crate) steps: Vec<Step>,
    pub(crate) answers: Answers,
}

/// Why a scan has no result. It never has an effect.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ScanFailed {
    /// The gateway did not run its reads.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// The scan itself failed.
    #[error(transparent)]
    Scan(#[from] ScanError),
    /// The protocol cannot scan.
    #[error("the protocol of this cluster cannot scan ranges of keys")]
    Unsupported,
    /// A node has an earlier version.
    #[error("{0} runs an earlier version, which cannot scan; upgrade it first")]
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
}

/// The scans of one gateway, and the names of their transactions.
#[derive(Debug)]
pub(crate) struct Scans {
    places: Arc<Semaphore>,
    /// Client ids that no scan uses now, each with the number of transactions that it has had.
    idle: Mutex<Vec<(ClientId, u64)>>,
}

impl Default for Scans {
    fn default() -> Self {
        Self { places: Arc::new(Semaphore::new(SCANS_MAX)), idle: Mutex::default() }
    }
}

/// Ends a scan's subscription when it is dropped.
struct Subscription<'a>(&'a dyn Backend, u64);

impl Drop for Subscription<'_> {
    fn drop(&mut self) {
        self.0.end_scan(self.1);
    }
}

/// The reads of one scan.
struct Reader<'a> {
    gateway: &'a Gateway,
    home: RegionId,
    priority: Priority,
    pause: Duration,
}

impl Gateway {
    /// Scans a range of keys: one page, as one consistent snapshot.
    ///
    /// # Errors
    /// See [`ScanFailed`]; a scan has no effect.
    pub async fn scan(&self, scan: Scan, priority: Priority) -> Result<Page, ScanFailed> {
        let scans = self.scans();
        let place = scans.places.clone().try_acquire_owned();
        let _place = place.map_err(|_| ScanFailed::Overloaded)?;
        let begun = self.backend().begin_scan(scan)?;
        let scanned = tokio::time::timeout(SCAN_WITHIN, self.drive(begun, priority));
        scanned.await.unwrap_or(Err(ScanFailed::Late))
    }

    async fn drive(&self, begun: BegunScan, priority: Priority) -> Result<Page, ScanFailed> {
        let BegunScan { number, mut scanner, home, steps, mut answers } = begun;
        let backend = self.backend();
        let _subscription = Subscription(backend, number);
        let mut reader = Reader { gateway: self, home, priority, pause: PAUSE };
        let start = Instant::now();
        let now = || Time(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        let mut steps = VecDeque::from(steps);
        loop {
            while let Some(step) = steps.pop_front() {
                match step {
                    Step::Ask(to, ask) => backend.ask(number, to, ask),
                    Step::Read(keys) => {
                        let finished = reader.read(keys).await?;
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
            let again = start + Duration::from_nanos(scanner.deadline().unwrap_or(Time::MAX).0);
            tokio::select! {
                answer = answers.recv() => {
                    let Some((from, answer)) = answer else { return Err(ScanFailed::Late) };
                    steps.extend(scanner.on_answer(from, answer, now()));
                }
                () = tokio::time::sleep_until(again) => steps.extend(scanner.on_time(now())),
            }
        }
    }
}

impl Reader<'_> {
    /// Reads these keys in one transaction.
    async fn read(&mut self, keys: Vec<Key>) -> Result<Finished, GatewayError> {
        let scans = self.gateway.scans();
        let idle = || scans.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let (client, before) = match taken {
            Some(taken) => taken,
            None => (self.gateway.register().await?, 0),
        };
        let counter = before + 1;
        let mut txn = Txn::read_only(TxnId::new(client, counter), self.home, keys);
        txn.priority = self.priority;
        txn.acknowledged_below = counter;
        let finished = match self.gateway.begin(txn).await? {
            Begun::Finished(finished) => finished,
            Begun::Reads(_) => {
                // A read-only transaction has one round. This is a defect of the gateway.
                tracing::error!(%client, "the read of a scan requested a decision");
                return Err(GatewayError::Lost(TxnId::new(client, counter)));
            }
        };
        match finished.outcome {
            Outcome::Committed(_) => {}
            Outcome::Aborted(AbortReason::TooLarge) => {}
            Outcome::Aborted(_) | Outcome::Unknown => {
                tokio::time::sleep(self.pause).await;
                self.pause = (self.pause * 2).min(PAUSE_MAX);
            }
        }
        // After an unknown outcome the client cannot say that it knows all its outcomes.
        if finished.outcome != Outcome::Unknown {
            idle().push((client, counter));
        }
        Ok(finished)
    }
}
