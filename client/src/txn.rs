//! Interactive transactions: read in one round, compute, write and commit in a second round.
//! [`crate::general`] has transactions with several rounds of reads.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use orthodrome_core::txn::{Key, Priority};
use orthodrome_core::{RegionId, TxnId};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use crate::Error;
use crate::client::{Inner, LastAbort, conclude};
use crate::gateway::{Failure, Stubs};
use crate::names::Name;
use crate::outcome::{AbortReason, Aborted, InDoubt, Outcome};
use crate::pace::Pace;
use crate::values::{Reads, Writes};
use crate::wire::{self, Ended, api};

/// A transaction to run: the keys it reads and those it may write.
#[derive(Clone, Debug)]
#[must_use = "nothing happens before `run` or `begin`"]
pub struct Transaction {
    client: Arc<Inner>,
    reads: Vec<Key>,
    writes: Vec<Key>,
    priority: Priority,
    deadline: Duration,
}

/// The reason why a closure gives up. Any error turns into one by `?`.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Abort {
    because: String,
}

impl Abort {
    /// Gives up for this reason. [`Aborted::because`] contains it.
    pub fn because(reason: impl fmt::Display) -> Self {
        Self { because: reason.to_string() }
    }

    pub(crate) fn into_reason(self) -> String {
        self.because
    }
}

impl<E: std::error::Error> From<E> for Abort {
    fn from(error: E) -> Self {
        Self::because(error)
    }
}

/// The result of [`Transaction::begin`].
#[derive(Debug)]
pub enum Begun {
    /// It has read its keys, and waits for the decision.
    Open(OpenTransaction),
    /// It aborted before it waited for a decision.
    Aborted(Aborted),
}

impl Transaction {
    pub(crate) fn new(client: Arc<Inner>) -> Self {
        let deadline = client.deadline;
        let (reads, writes) = (Vec::new(), Vec::new());
        Self { client, reads, writes, priority: Priority::LOW, deadline }
    }

    /// Reads this key. Naming a key twice is the same as naming it once.
    pub fn read(mut self, key: impl Into<Key>) -> Self {
        self.reads.push(key.into());
        self
    }

    /// May write this key. If the transaction needs its value, name it in [`Transaction::read`]
    /// too.
    pub fn write(mut self, key: impl Into<Key>) -> Self {
        self.writes.push(key.into());
        self
    }

    /// Sets the priority. The default is low.
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    /// Sets the deadline, retries included.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs the transaction: reads, calls `compute` with the values, writes what `compute` returns,
    /// and commits. If it aborts for a temporary reason, the library runs all of it again until the
    /// deadline. So `compute` may be called more than once, and must have no side effects.
    ///
    /// Dropping the future aborts the transaction, unless the library has already asked to commit
    /// it.
    ///
    /// # Errors
    /// [`Error::Invalid`] if `compute` writes a key that was not declared, or a bound is broken;
    /// otherwise as [`Error`] says. In every case nothing was committed.
    pub async fn run(
        self,
        mut compute: impl FnMut(&Reads) -> Result<Writes, Abort>,
    ) -> Result<Outcome, Error> {
        let mut pace = Pace::new(self.deadline);
        let mut name = self.client.take_name();
        let declared = self.declare()?;
        let mut last = LastAbort::default();
        loop {
            let began = Instant::now();
            let (home, begun) = match open(&self.client, &mut name, &declared, &mut pace).await {
                Ok(opened) => opened,
                Err(error) => return last.instead_of(error),
            };
            let (ended, txn) = match begun {
                Begun::Aborted(aborted) => (Ended::Aborted(aborted), None),
                Begun::Open(mut txn) => match compute(&txn.reads) {
                    Ok(writes) => (txn.decide(writes, &mut pace).await?, Some(txn)),
                    Err(Abort { because }) => {
                        let because = Some(because);
                        let reason = AbortReason::Client;
                        let aborted = Aborted { reason, retryable: false, because };
                        let ended = Ended::Aborted(aborted.clone());
                        let reads = Some(&txn.reads);
                        self.client.recorder.record(name.id(), home, began, &ended, reads, false);
                        txn.abort().await;
                        return Ok(Outcome::Aborted(aborted));
                    }
                },
            };
            let reads = txn.as_ref().map(|txn| &txn.reads);
            self.client.recorder.record(name.id(), home, began, &ended, reads, false);
            let doubt = || InDoubt {
                client: Arc::clone(&self.client),
                name: name.clone(),
                question: txn.as_ref().map(|txn| txn.question.clone()).unwrap_or_default(),
                reads: txn.as_ref().map(|txn| txn.reads.clone()),
                trouble: String::new(),
            };
            last.note(&ended);
            if let Some(outcome) = conclude(ended, &mut pace, doubt).await {
                return Ok(outcome);
            }
            name.retry();
        }
    }

    /// Begins the transaction and reads, for a caller that needs more than a closure between the
    /// two rounds. It is not retried after an abort. Its lease is extended until it is decided or
    /// dropped.
    ///
    /// ```no_run
    /// # async fn example(client: orthodrome_client::Client) -> Result<(), orthodrome_client::Error> {
    /// use orthodrome_client::{Begun, Writes};
    /// match client.transaction().read("a").write("a").begin().await? {
    ///     Begun::Open(open) => {
    ///         let longer = format!("{}!", open.reads().text("a").unwrap_or_default());
    ///         let outcome = open.commit(Writes::new().put("a", longer)).await?;
    ///     }
    ///     Begun::Aborted(aborted) => println!("{}", aborted.reason),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Error`] says.
    pub async fn begin(self) -> Result<Begun, Error> {
        let mut pace = Pace::new(self.deadline);
        let mut name = self.client.take_name();
        let declared = self.declare()?;
        loop {
            let (_, begun) = open(&self.client, &mut name, &declared, &mut pace).await?;
            match begun {
                Begun::Open(mut txn) => {
                    txn.deadline = self.deadline;
                    txn.keep_alive();
                    return Ok(Begun::Open(txn));
                }
                Begun::Aborted(aborted) => {
                    // The caller has not seen its reads, so it can be begun again.
                    let is_unseen = aborted.reason == AbortReason::StaleRead;
                    if !is_unseen || !pace.pause().await {
                        return Ok(Begun::Aborted(aborted));
                    }
                    name.retry();
                }
            }
        }
    }

    fn declare(&self) -> Result<api::BeginRequest, Error> {
        let distinct = |keys: &[Key]| {
            let mut keys = keys.to_vec();
            keys.sort_unstable();
            keys.dedup();
            wire::keys(keys)
        };
        let request = api::BeginRequest {
            read_keys: distinct(&self.reads),
            write_keys: distinct(&self.writes),
            priority: wire::priority(self.priority)?,
            ..Default::default()
        };
        self.client.check_size(&request)?;
        Ok(request)
    }
}

/// Why an open transaction cannot continue.
#[derive(Debug)]
pub(crate) enum Stop {
    /// It has aborted.
    Ended(Ended),
    /// It was not committed, and will not be.
    Error(Error),
}

impl Stop {
    pub(crate) fn to_error(&self) -> Error {
        match self {
            Self::Ended(Ended::Aborted(aborted)) => Error::Aborted(aborted.reason),
            Self::Ended(Ended::Committed(_)) => {
                Error::Unexpected("the transaction has committed".into())
            }
            Self::Ended(Ended::Unknown(text)) => Error::Deadline(text.clone()),
            Self::Error(error) => error.clone(),
        }
    }
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Error(error)
    }
}

/// Begins one attempt. Also returns the region in which it began.
pub(crate) async fn open(
    client: &Arc<Inner>,
    name: &mut Name,
    declared: &api::BeginRequest,
    pace: &mut Pace,
) -> Result<(RegionId, Begun), Error> {
    loop {
        let (at, home, names) = client.home(pace).await?;
        name.begin_at(&names, home);
        let mut begin = api::BeginRequest {
            txn: wire::txn_id(name.id()),
            home_region: home.0.into(),
            acknowledged_below: names.acknowledged_below(),
            session: client.known(&[&declared.read_keys[..], &declared.write_keys].concat()),
            ..declared.clone()
        };
        if client.check_size(&begin).is_err() {
            // The client checks here in any case that nothing it reads is too old.
            begin.session.clear();
        }
        // From here on, dropping the future aborts the transaction.
        let mut txn = OpenTransaction::new(Arc::clone(client), name.clone(), at, &begin);
        let answer = client.gateways.send(at, pace.deadline, begin, Stubs::begin).await;
        let ended = match answer {
            Ok(api::BeginResponse { result }) => match result {
                Some(api::begin_response::Result::Opened(opened)) => {
                    let reads = wire::reads(opened.reads);
                    if client.knows_more_than(&reads) {
                        // The gateway does not compare reads with what clients know. Dropping the
                        // transaction aborts it.
                        return Ok((home, Begun::Aborted(Aborted::behind())));
                    }
                    txn.set_reads(reads);
                    return Ok((home, Begun::Open(txn)));
                }
                Some(api::begin_response::Result::Finished(outcome)) => wire::ended(Some(outcome)),
                None => Ended::Unknown("the gateway's answer is empty".into()),
            },
            Err(Failure::Lost(text) | Failure::NotOpen(text)) => Ended::Unknown(text),
            Err(failure) => {
                txn.is_undecided = false;
                client.after_failure(at, failure, pace).await?;
                continue;
            }
        };
        // Nobody asked to commit it, so it cannot commit; ending it releases its keys.
        let ended = match ended {
            Ended::Unknown(_) => {
                name.was_resolved();
                client.ask(&txn.question, Some(at), pace).await
            }
            known @ (Ended::Committed(_) | Ended::Aborted(_)) => known,
        };
        return match ended {
            Ended::Aborted(aborted) => {
                txn.is_undecided = false;
                Ok((home, Begun::Aborted(aborted)))
            }
            Ended::Unknown(text) => Err(Error::Deadline(text)),
            Ended::Committed(_) => {
                txn.is_undecided = false;
                let id = name.id();
                Err(Error::Unexpected(format!("{id} committed without a request to commit")))
            }
        };
    }
}

/// An interactive transaction that has read its keys and waits for its decision. Dropping it aborts
/// it.
#[must_use = "dropping it aborts the transaction"]
pub struct OpenTransaction {
    client: Arc<Inner>,
    name: Name,
    at: usize,
    reads: Reads,
    /// Everything that another gateway needs in order to resolve it, including the decision once it
    /// is made.
    question: Box<api::ResolveRequest>,
    /// The keys that it may write; if none, it may write any key.
    write_keys: Option<Vec<bytes::Bytes>>,
    deadline: Duration,
    is_undecided: bool,
    keeper: Option<JoinHandle<()>>,
}

impl fmt::Debug for OpenTransaction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenTransaction").field("id", &self.id()).finish_non_exhaustive()
    }
}

impl OpenTransaction {
    fn new(client: Arc<Inner>, name: Name, at: usize, begin: &api::BeginRequest) -> Self {
        // A gateway that resolves the transaction later does not need what the client knew then.
        let begun = api::BeginRequest { session: Vec::new(), ..begin.clone() };
        let begun = Some(api::resolve_request::Begun::Interactive(begun));
        Self {
            deadline: client.deadline,
            client,
            name,
            at,
            reads: Reads::default(),
            question: Box::new(api::ResolveRequest { begun, ..Default::default() }),
            write_keys: (!begin.general).then(|| begin.write_keys.clone()),
            is_undecided: true,
            keeper: None,
        }
    }

    fn set_reads(&mut self, reads: Reads) {
        self.question.reads = wire::versions(&reads);
        self.reads = reads;
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> TxnId {
        self.name.id()
    }

    /// What it read.
    #[must_use]
    pub fn reads(&self) -> &Reads {
        &self.reads
    }

    /// Writes and commits.
    ///
    /// # Errors
    /// [`Error::Invalid`] if a key was not declared or a bound is broken; otherwise as [`Error`]
    /// says. In every case nothing was committed, and the transaction is aborted.
    pub async fn commit(mut self, writes: Writes) -> Result<Outcome, Error> {
        let mut pace = Pace::new(self.deadline);
        let ended = self.decide(writes, &mut pace).await?;
        Ok(match ended {
            Ended::Aborted(aborted) => Outcome::Aborted(aborted),
            Ended::Committed(timestamp) => {
                let reads = Some(std::mem::take(&mut self.reads));
                Outcome::Committed(crate::Committed { timestamp, reads })
            }
            Ended::Unknown(trouble) => Outcome::Unknown(InDoubt {
                client: Arc::clone(&self.client),
                name: self.name.clone(),
                question: std::mem::take(&mut self.question),
                reads: Some(std::mem::take(&mut self.reads)),
                trouble,
            }),
        })
    }

    /// Aborts the transaction, and waits for the gateway's answer. If the gateway cannot be
    /// reached, the transaction ends when its lease runs out.
    pub async fn abort(mut self) {
        if let Some(sent) = self.send_abort() {
            sent.await;
        }
    }

    /// True if it has declared that it may write `key`.
    pub(crate) fn may_write(&self, key: &Key) -> bool {
        let is_among = |keys: &Vec<bytes::Bytes>| {
            keys.binary_search_by(|held| held.as_ref().cmp(key.bytes())).is_ok()
        };
        self.write_keys.as_ref().is_none_or(is_among)
    }

    /// The request that resolves it if its outcome is in doubt.
    pub(crate) fn question(&self) -> Box<api::ResolveRequest> {
        self.question.clone()
    }

    /// Reads more keys in a general transaction. If the answer to a round is lost, the round is not
    /// sent again: it may still be pending, so the transaction is ended.
    pub(crate) async fn read_round(&mut self, keys: Vec<Key>, pace: &mut Pace) -> Result<(), Stop> {
        use api::read_round_response::Result as Answer;
        let request =
            api::ReadRoundRequest { txn: wire::txn_id(self.id()), keys: wire::keys(keys) };
        self.client.check_size(&request)?;
        let ended = loop {
            let send = self.client.gateways.send(
                self.at,
                pace.deadline,
                request.clone(),
                Stubs::read_round,
            );
            break match send.await {
                Ok(api::ReadRoundResponse { result }) => match result {
                    Some(Answer::Opened(opened)) => {
                        let round = wire::reads(opened.reads);
                        if self.client.knows_more_than(&round) {
                            // The caller does not see this round. Dropping the transaction aborts
                            // it.
                            return Err(Stop::Ended(Ended::Aborted(Aborted::behind())));
                        }
                        let mut reads = std::mem::take(&mut self.reads);
                        reads.0.extend(round.0);
                        self.set_reads(reads);
                        return Ok(());
                    }
                    Some(Answer::Finished(outcome)) => wire::ended(Some(outcome)),
                    None => Ended::Unknown("the gateway's answer is empty".into()),
                },
                Err(failure @ (Failure::Busy(_) | Failure::Never(_))) => {
                    self.client.after_failure(self.at, failure, pace).await?;
                    continue;
                }
                Err(
                    Failure::NotOpen(text)
                    | Failure::Unavailable(text)
                    | Failure::Unregistered(text)
                    | Failure::Lost(text),
                ) => Ended::Unknown(text),
            };
        };
        // Nobody asked to commit it, so it cannot commit; ending it releases its keys.
        let ended = match ended {
            Ended::Unknown(_) => {
                self.name.was_resolved();
                self.client.ask(&self.question, Some(self.at), pace).await
            }
            known @ (Ended::Committed(_) | Ended::Aborted(_)) => known,
        };
        match ended {
            Ended::Unknown(text) => Err(Stop::Error(Error::Deadline(text))),
            Ended::Aborted(_) => {
                self.is_undecided = false;
                Err(Stop::Ended(ended))
            }
            Ended::Committed(_) => {
                self.is_undecided = false;
                let text = format!("{} committed without a request to commit", self.id());
                Err(Stop::Error(Error::Unexpected(text)))
            }
        }
    }

    pub(crate) async fn decide(&mut self, writes: Writes, pace: &mut Pace) -> Result<Ended, Error> {
        let known = writes.clone();
        let ended = self.ask_to_commit(writes, pace).await?;
        if let Ended::Committed(at) = ended {
            self.client.learn_commit(at, Some(&self.reads), &known);
        }
        Ok(ended)
    }

    async fn ask_to_commit(&mut self, writes: Writes, pace: &mut Pace) -> Result<Ended, Error> {
        use api::resolve_request::Decision;
        if let Some(key) = writes.0.keys().find(|key| !self.may_write(key)) {
            return Err(Error::Invalid(format!("key {key} is not declared as a write key")));
        }
        let writes = wire::writes(writes);
        let commit = api::CommitRequest { txn: wire::txn_id(self.id()), writes: writes.clone() };
        self.question.decision = Some(Decision::Commit(api::Writes { writes }));
        // The client may have to resolve the transaction, and that request is longer than this one.
        self.client.check_size(&self.question)?;
        loop {
            // From here on, dropping the future does not abort the transaction.
            self.is_undecided = false;
            let send =
                self.client.gateways.send(self.at, pace.deadline, commit.clone(), Stubs::commit);
            let avoid = match send.await {
                Ok(answer) => match wire::ended(answer.outcome) {
                    Ended::Unknown(_) => None,
                    known @ (Ended::Committed(_) | Ended::Aborted(_)) => return Ok(known),
                },
                Err(failure @ (Failure::Busy(_) | Failure::Never(_))) => {
                    self.is_undecided = true;
                    self.client.after_failure(self.at, failure, pace).await?;
                    continue;
                }
                Err(Failure::NotOpen(_) | Failure::Unregistered(_)) => None,
                Err(Failure::Unavailable(_) | Failure::Lost(_)) => Some(self.at),
            };
            self.name.was_resolved();
            return Ok(self.client.ask(&self.question, avoid, pace).await);
        }
    }

    /// Extends the lease until the transaction is decided.
    pub(crate) fn keep_alive(&mut self) {
        let client = Arc::downgrade(&self.client);
        let at = self.at;
        let txns: Vec<api::TxnId> = wire::txn_id(self.id()).into_iter().collect();
        let lease = Duration::from_millis(self.client.limits.lease_ms.into());
        self.keeper = Some(tokio::spawn(async move {
            loop {
                tokio::time::sleep(lease / 3).await;
                let Some(client) = client.upgrade() else { return };
                let request = api::KeepAliveRequest { txns: txns.clone() };
                let until = tokio::time::Instant::now() + lease / 3;
                let kept = client.gateways.send(at, until, request, Stubs::keep_alive).await;
                // Without its lease the transaction has ended; its commit will fail.
                if kept.is_ok_and(|kept| !kept.not_open.is_empty()) {
                    return;
                }
            }
        }));
    }

    /// Sends the abort in the background, once.
    fn send_abort(&mut self) -> Option<impl Future<Output = ()> + use<>> {
        if let Some(keeper) = self.keeper.take() {
            keeper.abort();
        }
        if !std::mem::take(&mut self.is_undecided) {
            return None;
        }
        let client = Arc::clone(&self.client);
        // The cluster keeps the name until the gateway has answered.
        let (name, at) = (self.name.clone(), self.at);
        // Without a runtime nothing can be sent. The lease ends the transaction.
        let runtime = Handle::try_current().ok()?;
        let sent = runtime.spawn(async move {
            let request = api::AbortRequest { txn: wire::txn_id(name.id()) };
            let until = Pace::new(client.deadline).deadline;
            // If it fails, the lease ends the transaction.
            let _ = client.gateways.send(at, until, request, Stubs::abort).await;
        });
        Some(async move { sent.await.unwrap_or_default() })
    }
}

impl Drop for OpenTransaction {
    fn drop(&mut self) {
        drop(self.send_abort());
    }
}
