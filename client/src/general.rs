//! General transactions, which choose their keys while they read.
//!
//! If the cluster's protocol runs them, every round of reads is a call to the gateway, under the
//! transaction's locks. Otherwise the library first reads with read-only transactions
//! (*reconnaissance*). It then declares every key that it has seen in one interactive transaction,
//! and commits only if that reads the same versions. If another transaction has changed a value
//! meanwhile, the next attempt declares the same keys at its start, and its closure computes from
//! what that reads. So a transaction that others always overtake commits nevertheless. Callers see
//! no difference except in speed.

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use orthodrome_core::txn::{Key, Priority, Read, Value};
use orthodrome_core::{RegionId, Timestamp, TxnId};
use tokio::time::Instant;

use crate::client::{Client, Inner, LastAbort, Query};
use crate::names::Name;
use crate::outcome::{AbortReason, Aborted, Committed, InDoubt, Outcome};
use crate::pace::Pace;
use crate::txn::{Begun, OpenTransaction, Stop, Transaction, open};
use crate::values::{Reads, Writes};
use crate::wire::{self, Ended, api};
use crate::{Abort, Error};

/// A general transaction to run.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `run` or `begin`"]
pub struct General {
    client: Arc<Inner>,
    priority: Priority,
    deadline: Duration,
}

impl Client {
    /// A transaction that finds its keys by reading.
    ///
    /// ```no_run
    /// # async fn example(client: orthodrome_client::Client) -> Result<(), orthodrome_client::Error> {
    /// use orthodrome_client::Abort;
    /// // Serve the first of a queue; one key says who that is.
    /// let outcome = client
    ///     .general()
    ///     .run(|txn| async move {
    ///         let Some(first) = txn.text("queue/first").await? else {
    ///             return Err(Abort::because("nobody waits"));
    ///         };
    ///         let next = txn.get(format!("queue/after/{first}")).await?;
    ///         txn.put(format!("served/{first}"), "yes");
    ///         match next {
    ///             Some(next) => txn.put("queue/first", next),
    ///             None => txn.delete("queue/first"),
    ///         }
    ///         Ok(())
    ///     })
    ///     .await?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn general(&self) -> General {
        let client = Arc::clone(&self.inner);
        General { priority: Priority::LOW, deadline: client.deadline, client }
    }
}

impl General {
    /// Sets the priority. The default is low.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the deadline, retries included. For a transaction begun with [`General::begin`], the
    /// deadline holds for each call.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs the transaction: `compute` reads and buffers writes, and then the library commits them.
    /// If the transaction aborts for a temporary reason, the library runs all of it again until the
    /// deadline. So `compute` may be called more than once, and must have no side effects.
    ///
    /// `compute` must also tolerate reads that are inconsistent with each other. Such a run never
    /// commits, and if `compute` gives up in such a run, the library calls it again. But the
    /// library detects this only after the run.
    ///
    /// Dropping the future aborts the transaction, unless the library has already asked to commit
    /// it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a bound is broken; otherwise as [`Error`] says. In every case nothing
    /// was committed.
    pub async fn run<F, T>(self, mut compute: F) -> Result<Outcome, Error>
    where
        F: FnMut(GeneralTxn) -> T,
        T: Future<Output = Result<(), Abort>>,
    {
        let mut pace = Pace::new(self.deadline);
        let mut name = self.client.take_name();
        let mut last = LastAbort::default();
        let mut seen = Seen::default();
        loop {
            let mut rounds = OpenGeneral::new(&self, name, Some(pace.deadline));
            rounds.begin_as_seen(seen).await;
            let attempt = Arc::new(Attempt {
                rounds: tokio::sync::Mutex::new(Some(rounds)),
                writes: Mutex::default(),
            });
            let computed = compute(GeneralTxn(Arc::clone(&attempt))).await;
            // A handle that outlives its closure finds the transaction ended.
            let Some(mut rounds) = attempt.rounds.lock().await.take() else {
                return Err(Error::Unexpected("the transaction ended twice".into()));
            };
            let writes = std::mem::take(&mut *attempt.writes());
            seen = rounds.seen(&writes);
            let outcome = match computed {
                Ok(()) => rounds.end(writes).await,
                Err(abort) => rounds.give_up(abort).await,
            };
            match outcome.or_else(|error| last.instead_of(error))? {
                Outcome::Aborted(aborted) if aborted.retryable && pace.pause().await => {
                    last = LastAbort(Some(aborted));
                    name = rounds.into_name();
                    name.retry();
                }
                outcome @ (Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown(_)) => {
                    return Ok(outcome);
                }
            }
        }
    }

    /// Begins a transaction for a caller that needs more than a closure between its rounds. It is
    /// not retried after an abort. Its lease is extended until it is decided or dropped.
    pub fn begin(self) -> OpenGeneral {
        let name = self.client.take_name();
        OpenGeneral::new(&self, name, None)
    }
}

/// The keys of an attempt that aborted, for the next one to declare at its start.
#[derive(Default)]
struct Seen {
    reads: Vec<Key>,
    writes: Vec<Key>,
}

/// One call of a closure.
struct Attempt {
    rounds: tokio::sync::Mutex<Option<OpenGeneral>>,
    writes: Mutex<Writes>,
}

impl Attempt {
    fn writes(&self) -> MutexGuard<'_, Writes> {
        // No code that holds the lock can leave the writes half changed.
        self.writes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A general transaction, as the closure of [`General::run`] sees it.
///
/// If a read fails, every later call fails too. The closure should return the error; the library
/// ignores any other result then.
pub struct GeneralTxn(Arc<Attempt>);

impl fmt::Debug for GeneralTxn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GeneralTxn").finish_non_exhaustive()
    }
}

impl GeneralTxn {
    /// The value of the key, including the transaction's own writes.
    ///
    /// # Errors
    /// The transaction cannot continue.
    pub async fn get(&self, key: impl Into<Key>) -> Result<Option<Value>, Abort> {
        Ok(self.get_all([key]).await?.pop().flatten())
    }

    /// The same, as text; none also if it is not UTF-8.
    ///
    /// # Errors
    /// The transaction cannot continue.
    pub async fn text(&self, key: impl Into<Key>) -> Result<Option<String>, Abort> {
        let value = self.get(key).await?;
        Ok(value.and_then(|value| String::from_utf8(value.0.to_vec()).ok()))
    }

    /// The values of several keys, in their order, in one round.
    ///
    /// # Errors
    /// The transaction cannot continue.
    pub async fn get_all<K: Into<Key>>(
        &self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<Vec<Option<Value>>, Abort> {
        let keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        let unwritten: Vec<Key> = {
            let writes = self.0.writes();
            keys.iter().filter(|key| !writes.0.contains_key(*key)).cloned().collect()
        };
        let mut rounds = self.0.rounds.lock().await;
        let rounds = rounds.as_mut().ok_or_else(|| Abort::because("the transaction has ended"))?;
        rounds.read(unwritten).await?;
        let writes = self.0.writes();
        let value = |key: &Key| match writes.0.get(key) {
            Some(written) => written.clone(),
            None => rounds.reads.0.get(key).and_then(|read| read.value.clone()),
        };
        Ok(keys.iter().map(value).collect())
    }

    /// Sets a key. The write takes effect when the transaction commits.
    pub fn put(&self, key: impl Into<Key>, value: impl Into<Value>) {
        self.0.writes().0.insert(key.into(), Some(value.into()));
    }

    /// Removes a key. The removal takes effect when the transaction commits.
    pub fn delete(&self, key: impl Into<Key>) {
        self.0.writes().0.insert(key.into(), None);
    }
}

/// A general transaction between its rounds. Dropping it aborts it.
#[must_use = "dropping it aborts the transaction"]
pub struct OpenGeneral {
    client: Arc<Inner>,
    priority: Priority,
    deadline: Duration,
    /// The deadline of the whole transaction, if there is one; otherwise each call has `deadline`.
    until: Option<Instant>,
    name: Name,
    /// What it has read in all rounds.
    reads: Reads,
    /// The gateway's side of the transaction, after the first round. With reconnaissance: while an
    /// attempt needs no other keys than the one before it.
    native: Option<Native>,
    /// With reconnaissance: the number of snapshots that the reads came from, and the timestamp of
    /// the last.
    snapshots: (u32, Timestamp),
    /// Why it cannot continue, if so.
    stopped: Option<Stop>,
}

/// A transaction that is open at a gateway.
struct Native {
    txn: OpenTransaction,
    home: RegionId,
    began: std::time::Instant,
}

impl fmt::Debug for OpenGeneral {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenGeneral").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl OpenGeneral {
    fn new(general: &General, name: Name, until: Option<Instant>) -> Self {
        let General { client, priority, deadline } = general;
        Self {
            client: Arc::clone(client),
            priority: *priority,
            deadline: *deadline,
            until,
            name,
            reads: Reads::default(),
            native: None,
            snapshots: (0, Timestamp::ZERO),
            stopped: None,
        }
    }

    /// The transaction's name. With reconnaissance the cluster does not know this name: the
    /// transaction commits under a later one.
    #[must_use]
    pub fn id(&self) -> TxnId {
        self.name.id()
    }

    /// What it has read in all rounds.
    #[must_use]
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Reads these keys in one round. Values that were read before stay the same.
    ///
    /// # Errors
    /// [`Error::Aborted`] if the transaction was aborted; otherwise as [`Error`] says. The
    /// transaction cannot continue then.
    pub async fn read<K: Into<Key>>(
        &mut self,
        keys: impl IntoIterator<Item = K>,
    ) -> Result<(), Error> {
        if let Some(stop) = &self.stopped {
            return Err(stop.to_error());
        }
        let mut keys: Vec<Key> = keys.into_iter().map(Into::into).collect();
        keys.retain(|key| !self.reads.0.contains_key(key));
        keys.sort_unstable();
        keys.dedup();
        if keys.is_empty() {
            return Ok(());
        }
        let read = if self.client.runs_general {
            self.read_natively(keys).await
        } else if let Some(reads) = self.declared(&keys) {
            self.reads.0.extend(reads);
            Ok(())
        } else {
            // It needs a key that it has not declared. Dropping the transaction aborts it.
            self.native = None;
            self.read_ahead(keys).await
        };
        read.map_err(|stop| self.stopped.insert(stop).to_error())
    }

    /// Writes and commits.
    ///
    /// # Errors
    ///
    /// [`Error::Invalid`] if a bound is broken; otherwise as [`Error`] says. In every case nothing
    /// was committed, and the transaction is aborted.
    pub async fn commit(mut self, writes: Writes) -> Result<Outcome, Error> {
        self.end(writes).await
    }

    /// Aborts the transaction, and waits for the gateway's answer. If the gateway cannot be
    /// reached, the transaction ends when its lease runs out.
    pub async fn abort(mut self) {
        if let Some(native) = self.native.take() {
            native.txn.abort().await;
        }
    }

    fn into_name(self) -> Name {
        self.name
    }

    /// The time that the next call may take.
    fn left(&self) -> Duration {
        let left = self.until.map(|until| until.saturating_duration_since(Instant::now()));
        left.unwrap_or(self.deadline)
    }

    /// One more round at the gateway. The first round begins the transaction.
    async fn read_natively(&mut self, keys: Vec<Key>) -> Result<(), Stop> {
        let mut pace = Pace::new(self.left());
        match &mut self.native {
            Some(native) => native.txn.read_round(keys, &mut pace).await?,
            None => self.begin_natively(keys, &mut pace).await?,
        }
        if let Some(native) = &self.native {
            self.reads.clone_from(native.txn.reads());
        }
        Ok(())
    }

    async fn begin_natively(&mut self, keys: Vec<Key>, pace: &mut Pace) -> Result<(), Stop> {
        let declared = api::BeginRequest {
            read_keys: wire::keys(keys),
            priority: wire::priority(self.priority)?,
            general: true,
            ..Default::default()
        };
        self.open(declared, pace).await
    }

    /// With reconnaissance: the keys of this attempt, which wrote `writes`. Otherwise none.
    fn seen(&self, writes: &Writes) -> Seen {
        if self.client.runs_general {
            return Seen::default();
        }
        let writes: Vec<Key> = writes.0.keys().cloned().collect();
        Seen { reads: self.reads.0.keys().cloned().collect(), writes }
    }

    /// With reconnaissance: begins a transaction that declares the keys of the attempt before.
    async fn begin_as_seen(&mut self, Seen { reads, writes }: Seen) {
        if reads.is_empty() {
            return;
        }
        let mut pace = Pace::new(self.left());
        let begin = async {
            let declared = api::BeginRequest {
                read_keys: wire::keys(reads),
                write_keys: wire::keys(writes),
                priority: wire::priority(self.priority)?,
                ..Default::default()
            };
            self.open(declared, &mut pace).await
        };
        match begin.await {
            // Until it commits, nothing says that its reads held at one time.
            Ok(()) => self.snapshots = (2, Timestamp::ZERO),
            Err(stop) => self.stopped = Some(stop),
        }
    }

    /// With reconnaissance: the reads of these keys, if the transaction has declared all of them.
    fn declared(&self, keys: &[Key]) -> Option<Vec<(Key, Read)>> {
        let reads = &self.native.as_ref()?.txn.reads().0;
        keys.iter().map(|key| Some((key.clone(), reads.get(key)?.clone()))).collect()
    }

    async fn open(&mut self, declared: api::BeginRequest, pace: &mut Pace) -> Result<(), Stop> {
        let began = std::time::Instant::now();
        self.client.check_size(&declared)?;
        let (home, begun) = open(&self.client, &mut self.name, &declared, pace).await?;
        match begun {
            Begun::Open(mut txn) => {
                txn.keep_alive();
                self.native = Some(Native { txn, home, began });
                Ok(())
            }
            Begun::Aborted(aborted) => {
                let ended = Ended::Aborted(aborted);
                self.client.recorder.record(self.name.id(), home, began, &ended, None, false);
                Err(Stop::Ended(ended))
            }
        }
    }

    fn query(&self, keys: Vec<Key>) -> Query {
        Query::new(&self.client, keys, self.priority, self.left())
    }

    /// One more round of reconnaissance.
    async fn read_ahead(&mut self, keys: Vec<Key>) -> Result<(), Stop> {
        let snapshot = self.query(keys).await?;
        self.reads.0.extend(snapshot.reads.0);
        self.snapshots = (self.snapshots.0 + 1, snapshot.timestamp);
        Ok(())
    }

    /// Commits the writes that the closure or the caller computed.
    async fn end(&mut self, writes: Writes) -> Result<Outcome, Error> {
        let is_declared = |native: &Native| writes.0.keys().all(|key| native.txn.may_write(key));
        let ended = if self.stopped.is_some() {
            self.end_stopped()
        } else if self.client.runs_general || self.native.as_ref().is_some_and(is_declared) {
            self.end_natively(writes).await
        } else {
            self.native = None;
            return self.end_ahead(writes).await;
        };
        Ok(match ended? {
            Ended::Committed(timestamp) => {
                let reads = Some(std::mem::take(&mut self.reads));
                Outcome::Committed(Committed { timestamp, reads })
            }
            Ended::Aborted(aborted) => Outcome::Aborted(aborted),
            Ended::Unknown(trouble) => Outcome::Unknown(InDoubt {
                client: Arc::clone(&self.client),
                name: self.name.clone(),
                question: self
                    .native
                    .take()
                    .map(|native| native.txn.question())
                    .unwrap_or_default(),
                reads: Some(std::mem::take(&mut self.reads)),
                trouble,
            }),
        })
    }

    /// Ends a transaction of which a round failed: it has aborted, or was never begun.
    fn end_stopped(&mut self) -> Result<Ended, Error> {
        match self.stopped.take() {
            Some(Stop::Ended(ended)) => {
                self.record(&ended);
                Ok(ended)
            }
            Some(Stop::Error(error)) => Err(error),
            None => Err(Error::Unexpected("the transaction is still pending".into())),
        }
    }

    async fn end_natively(&mut self, writes: Writes) -> Result<Ended, Error> {
        let mut pace = Pace::new(self.left());
        if self.native.is_none()
            && let Err(stop) = self.begin_natively(Vec::new(), &mut pace).await
        {
            self.stopped = Some(stop);
            return self.end_stopped();
        }
        let Some(native) = &mut self.native else {
            return Err(Error::Unexpected("the transaction was not submitted".into()));
        };
        let ended = native.txn.decide(writes, &mut pace).await?;
        self.record(&ended);
        Ok(ended)
    }

    /// Records this attempt, if a gateway knew it.
    fn record(&self, ended: &Ended) {
        if let Some(Native { txn, home, began }) = &self.native {
            self.client.recorder.record(txn.id(), *home, *began, ended, Some(&self.reads), false);
        }
    }

    /// With reconnaissance: declares every key that was seen, reads them again, and compares.
    async fn end_ahead(&mut self, writes: Writes) -> Result<Outcome, Error> {
        if writes.is_empty() {
            return Ok(match self.is_one_snapshot().await? {
                Some(timestamp) => {
                    let reads = Some(std::mem::take(&mut self.reads));
                    Outcome::Committed(Committed { timestamp, reads })
                }
                None => stale(),
            });
        }
        let mut txn = Transaction::new(Arc::clone(&self.client))
            .priority(self.priority)
            .deadline(self.left());
        for key in self.reads.0.keys() {
            txn = txn.read(key.clone());
        }
        for key in writes.0.keys() {
            txn = txn.write(key.clone());
        }
        let mut has_changed = false;
        let compare = |now: &Reads| {
            has_changed = !is_same(now, &self.reads);
            if has_changed {
                Err(Abort::because("a value that the transaction read has changed"))
            } else {
                Ok(writes.clone())
            }
        };
        let outcome = txn.run(compare).await?;
        Ok(if has_changed { stale() } else { outcome })
    }

    /// The timestamp at which all reads held together, if there was one.
    async fn is_one_snapshot(&mut self) -> Result<Option<Timestamp>, Error> {
        let (count, at) = self.snapshots;
        if count <= 1 {
            return Ok(Some(at));
        }
        let now = self.query(self.reads.0.keys().cloned().collect()).await?;
        Ok(is_same(&now.reads, &self.reads).then_some(now.timestamp))
    }

    /// Ends a transaction whose closure gave up, for a reason of its own or because a round failed.
    async fn give_up(&mut self, abort: Abort) -> Result<Outcome, Error> {
        if self.stopped.is_some() {
            return self.end(Writes::new()).await;
        }
        if !self.client.runs_general && self.is_one_snapshot().await?.is_none() {
            // The closure may have given up because of inconsistent reads.
            return Ok(stale());
        }
        let because = Some(abort.into_reason());
        let aborted = Aborted { reason: AbortReason::Client, retryable: false, because };
        self.record(&Ended::Aborted(aborted.clone()));
        if let Some(native) = self.native.take() {
            native.txn.abort().await;
        }
        Ok(Outcome::Aborted(aborted))
    }
}

fn stale() -> Outcome {
    Outcome::Aborted(Aborted { reason: AbortReason::StaleRead, retryable: true, because: None })
}

/// True if both saw the same versions.
fn is_same(now: &Reads, before: &Reads) -> bool {
    let version = |reads: &Reads, key: &Key| reads.0.get(key).map(Read::compared);
    before.0.keys().all(|key| version(now, key) == version(before, key))
}
