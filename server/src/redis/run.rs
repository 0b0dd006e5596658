//! Runs a list of commands as one transaction, and tries again after conflicts.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use orthodrome_core::procedure::redis::entry::Stamp;
use orthodrome_core::procedure::redis::messages::{CHANNELS, SHARD_CHANNELS};
use orthodrome_core::procedure::redis::reply::Failure;
use orthodrome_core::procedure::redis::{Batch, Command, Evaluation, KeyName};
use orthodrome_core::txn::{AbortReason, Op, Reads};
use orthodrome_core::{ClientId, Key, Outcome, RegionId, Txn, TxnId};
use tokio::sync::{OnceCell, oneshot};
use tokio::time::Instant;

use super::blocking::Queues;
use super::listing::Listings;
use super::messages::Hub;
use super::names::{Name, Names};
use super::scripts::Scripts;
use crate::backoff::Backoff;
use crate::gateway::Finished;
use crate::service::{Front, Principal, Refusal};

const PAUSE_MIN: Duration = Duration::from_millis(2);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// The outcome of a transaction cannot be found out.
const UNKNOWN: Failure = Failure::new(
    "UNKNOWN the outcome of this transaction is not known: it may have taken effect, or may still \
     take effect, or not; read the keys to find out",
);
/// A transaction took effect, and the values for its answers were lost.
const NO_ANSWER: Failure = Failure::new(
    "COMMITTED this transaction took effect, but its answers were lost; read the keys instead",
);
const TOO_LARGE: Failure = Failure::new(
    "ERR the transaction is too large: it may write 8388608 bytes, read 15728640 bytes of one \
     partition, and pass over 67108864 bytes of values (each instruction of a script counts 4); it \
     had no effect",
);

/// Commands that run as one transaction.
#[derive(Clone, Debug)]
pub(super) struct Work<'a> {
    /// The keys.
    pub(super) keys: &'a [KeyName],
    /// The commands.
    pub(super) commands: &'a [Command],
    /// Keys that must not have changed.
    pub(super) watched: &'a [(u32, Option<Stamp>)],
}

/// Why a transaction has no answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Trouble {
    /// A watched key has changed. The transaction had no effect.
    Watch,
    /// It is too large. It had no effect, and smaller parts of it may succeed.
    TooLarge,
    /// An error for the client.
    Failed(Failure),
}

impl Trouble {
    /// The error for the client.
    pub(super) fn failure(self) -> Failure {
        match self {
            Self::TooLarge => TOO_LARGE,
            Self::Failed(failure) => failure,
            Self::Watch => Failure::new("ERR a watched key has changed"),
        }
    }
}

/// Runs transactions for all connections of a node.
pub(super) struct Runner {
    front: Arc<Front>,
    names: Names,
    scripts: Scripts,
    listings: Listings,
    hub: Arc<Hub>,
    queues: Arc<Queues>,
    /// The client id of all of them, once it is known.
    client: OnceCell<ClientId>,
    home: RegionId,
}

/// One attempt after the other at one transaction.
struct Attempt {
    /// Its name is pending until the last attempt has ended, which may be after the client has got an
    /// answer.
    name: Arc<Name>,
    id: TxnId,
    deadline: Instant,
    backoff: Backoff,
}

impl Attempt {
    /// Pauses before another attempt: twice as long each time, minus a random part. False if no
    /// time is left.
    async fn pause(&mut self) -> bool {
        let until = Instant::now() + self.backoff.pause();
        if until >= self.deadline {
            return false;
        }
        tokio::time::sleep_until(until).await;
        true
    }
}

/// The time of this machine, in milliseconds since 1970.
pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The key of the database in which a key of Redis is stored.
pub(super) fn stored((database, name): &KeyName) -> Key {
    let mut key = prefix(*database).into_bytes();
    key.extend_from_slice(name);
    Key::from(key)
}

/// What the keys of a database of Redis begin with. Those of channels are outside of
/// [`super::listing`]'s range of all databases.
pub(super) fn prefix(database: u8) -> String {
    match database {
        CHANNELS => "redis/m/".to_owned(),
        SHARD_CHANNELS => "redis/n/".to_owned(),
        database => format!("redis/{database}/"),
    }
}

impl Runner {
    pub(super) fn new(front: Arc<Front>, names: Names, listings: Listings) -> Self {
        let (home, scripts, client) = (front.home(), Scripts::default(), OnceCell::new());
        let (hub, queues) = (Arc::default(), Arc::default());
        Self { front, names, scripts, listings, hub, queues, client, home }
    }

    pub(super) fn front(&self) -> &Front {
        &self.front
    }

    /// The scripts that clients of the node have sent.
    pub(super) fn scripts(&self) -> &Scripts {
        &self.scripts
    }

    /// What the node keeps for commands that list keys.
    pub(super) fn listings(&self) -> &Listings {
        &self.listings
    }

    /// The subscriptions of the clients of the node.
    pub(super) fn hub(&self) -> &Arc<Hub> {
        &self.hub
    }

    /// The blocked clients of the node.
    pub(super) fn queues(&self) -> &Arc<Queues> {
        &self.queues
    }

    async fn attempt(&self) -> Result<Attempt, Trouble> {
        let client = self.client.get_or_try_init(|| self.front.register()).await;
        let client = *client.map_err(|error| failed(format!("ERR {error}")))?;
        let name = self.names.take();
        let deadline = Instant::now() + self.front.limits().request_timeout;
        let backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        Ok(Attempt { id: name.of(client), name: Arc::new(name), deadline, backoff })
    }

    /// Runs commands as one transaction.
    pub(super) async fn run(
        self: &Arc<Self>,
        caller: &Arc<Principal>,
        work: &Work<'_>,
    ) -> Result<(Batch, Evaluation), Trouble> {
        let names: Vec<Key> = work.keys.iter().map(stored).collect();
        let batch = |is_wide| {
            Batch::new(names.len(), work.commands.to_vec(), work.watched.to_vec(), is_wide)
        };
        if names.is_empty() {
            // Scripts without keys: nothing of the database takes part.
            let mut batch = batch(false);
            batch.now_ms = now_ms();
            let evaluation =
                batch.evaluate(|_| None, self.front.limits().response_bytes_max as usize);
            // There is no other point at which other connections get their turn.
            tokio::task::yield_now().await;
            if evaluation.is_too_large {
                return Err(Trouble::TooLarge);
            }
            return Ok((batch, evaluation));
        }
        let is_write = !work.commands.iter().all(Command::is_read_only);
        let mut attempt = self.attempt().await?;
        let (mut batch_now, wide) = (batch(false), batch(true));
        loop {
            batch_now.now_ms = now_ms();
            batch_now.stamp = Stamp { client: attempt.id.client.0, counter: attempt.id.counter };
            let txn = self.txn(&attempt, &batch_now, &names);
            let outcome = self.outcome(caller, (txn, is_write), &mut attempt).await?;
            let reads = match outcome {
                Ended::Committed(reads) => reads,
                Ended::Aborted(reason) => {
                    attempt.id = attempt.id.retry();
                    if reason == AbortReason::Guard && batch_now.keys != wide.keys {
                        // Either a key has expired that must be declared to be removed, or a
                        // watched key has changed; the next attempt finds out which.
                        batch_now = wide.clone();
                        continue;
                    }
                    retry_or_fail(reason, work)?;
                    if !attempt.pause().await {
                        return Err(busy(reason));
                    }
                    continue;
                }
            };
            let needs_reads = batch_now.keys.iter().any(|access| access.reads);
            let Some(reads) = reads.or_else(|| (!needs_reads).then(Reads::new)) else {
                return Err(Trouble::Failed(NO_ANSWER));
            };
            let value = |key: usize| reads.get(names.get(key)?)?.value.clone();
            let most = self.front.limits().response_bytes_max as usize;
            let evaluation = batch_now.evaluate(value, most);
            if evaluation.needs_more_writes {
                batch_now = wide.clone();
                let deadline = attempt.deadline;
                attempt = Attempt { deadline, ..self.attempt().await? };
                continue;
            }
            if !evaluation.is_watch_kept {
                return Err(Trouble::Watch);
            }
            if evaluation.is_too_large {
                return Err(Trouble::TooLarge);
            }
            return Ok((batch_now, evaluation));
        }
    }

    fn txn(&self, attempt: &Attempt, batch: &Batch, names: &[Key]) -> Txn {
        let mut txn = if batch.is_read_only() {
            let read = names.iter().zip(&batch.keys).filter(|(_, access)| access.reads);
            Txn::read_only(attempt.id, self.home, read.map(|(name, _)| name.clone()).collect())
        } else {
            Txn::procedure(attempt.id, self.home, vec![Op::Call(batch.call(names))])
        };
        txn.acknowledged_below = self.names.acknowledged_below();
        txn
    }

    /// Runs one attempt until its outcome is known, or until the client's time is over. Requests that
    /// the node refuses for lack of room are repeated.
    async fn outcome(
        self: &Arc<Self>,
        caller: &Arc<Principal>,
        (txn, is_write): (Txn, bool),
        attempt: &mut Attempt,
    ) -> Result<Ended, Trouble> {
        loop {
            let pursued = self.pursue(caller, (txn.clone(), is_write), &attempt.name);
            let finished = match tokio::time::timeout_at(attempt.deadline, pursued).await {
                Ok(Ok(Ok(finished))) => finished,
                Ok(Ok(Err(Refusal::Busy(text)))) => {
                    if !attempt.pause().await {
                        return Err(failed(format!("ERR {text}")));
                    }
                    continue;
                }
                Ok(Ok(Err(Refusal::Denied(text)))) => return Err(failed(format!("NOPERM {text}"))),
                Ok(Ok(Err(Refusal::Never(text)))) => return Err(failed(format!("ERR {text}"))),
                // The client's time is over, or the node ends.
                Ok(Err(_)) | Err(_) => return Err(Trouble::Failed(UNKNOWN)),
            };
            return match finished.outcome {
                Outcome::Committed(_) => Ok(Ended::Committed(finished.reads)),
                Outcome::Aborted(reason) => Ok(Ended::Aborted(reason)),
                Outcome::Unknown => Err(Trouble::Failed(UNKNOWN)),
            };
        }
    }

    /// Runs one attempt until its outcome is known, whether anybody waits for it or not: until then its
    /// name is pending, so that its outcome is kept (R6).
    fn pursue(
        self: &Arc<Self>,
        caller: &Arc<Principal>,
        (txn, is_write): (Txn, bool),
        name: &Arc<Name>,
    ) -> oneshot::Receiver<Result<Finished, Refusal>> {
        let (tell, told) = oneshot::channel();
        let (runner, caller, name) = (self.clone(), caller.clone(), name.clone());
        tokio::spawn(async move {
            let mut answer = runner.front.run(&caller, txn.clone(), is_write).await;
            let mut backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
            while let Ok(Finished { outcome: Outcome::Unknown, .. }) = answer
                && !runner.front.is_ending()
            {
                tokio::time::sleep(backoff.pause()).await;
                answer = Ok(runner.front.resolve(txn.clone()).await);
            }
            // Nobody waits any more if the client's time is over.
            let _ = tell.send(answer);
            drop(name);
        });
        told
    }
}

/// The outcome of an attempt.
enum Ended {
    /// With the values read, unless they were lost.
    Committed(Option<Reads>),
    Aborted(AbortReason),
}

fn failed(text: String) -> Trouble {
    Trouble::Failed(Failure::of(text))
}

fn busy(reason: AbortReason) -> Trouble {
    failed(format!(
        "ERR the transaction aborted ({reason}) until limits.request_timeout_ms had passed; it had \
         no effect"
    ))
}

/// Returns if another attempt may succeed.
fn retry_or_fail(reason: AbortReason, work: &Work<'_>) -> Result<(), Trouble> {
    match reason {
        AbortReason::Conflict
        | AbortReason::StaleRead
        | AbortReason::Recovery
        | AbortReason::Abandoned
        | AbortReason::Overload => Ok(()),
        AbortReason::Guard if !work.watched.is_empty() => Err(Trouble::Watch),
        AbortReason::TooLarge => Err(Trouble::TooLarge),
        AbortReason::Guard | AbortReason::Client | AbortReason::Invalid => {
            Err(failed(format!("ERR the transaction aborted ({reason}); it had no effect")))
        }
    }
}
