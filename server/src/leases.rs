//! Leases at a gateway: runs the transactions of [`orthodrome_core::lease`].

use std::time::Duration;

use orthodrome_core::lease::{self, Ending, LeaseId, Progress};
use orthodrome_core::scan::Scan;
use orthodrome_core::txn::{AbortReason, Op, Priority, Reads, Writes};
use orthodrome_core::{Decision, Key, Outcome, Timestamp, Txn};
use ring::rand::{SecureRandom as _, SystemRandom};
use tokio::task::JoinSet;

use crate::gateway::{Gateway, GatewayError};
use crate::node::ClockError;
use crate::own_txns::OwnTxns;
use crate::scan::ScanFailed;

/// How long a call may take, without faults many times as long as it does.
const WITHIN: Duration = Duration::from_secs(30);

/// The most due entries that one look lists.
const LISTED: usize = 1_024;

/// The number of leases that a gateway ends at the same time.
const ENDED_AT_ONCE: usize = 16;

/// A lease that is due for so long is ended by any gateway: the one that its name chooses may be down.
const OVERDUE: Duration = Duration::from_secs(5);

/// The most keys of a lease that [`Gateway::lease`] returns.
pub const KEYS_SHOWN: usize = 128;

/// Why a call failed. Repeat it, unless the lease has ended: it may have had its effect, and has it
/// once.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum LeaseError {
    /// There is no such lease.
    #[error(
        "the lease {0} has ended, or was never granted here; its keys are deleted, so grant a new one"
    )]
    Ended(LeaseId),
    /// The time is out of bounds.
    #[error(
        "ttl_ms: a lease lives between {} and {} ms without a renewal",
        lease::TTL_MIN.as_millis(),
        lease::TTL_MAX.as_millis()
    )]
    Ttl,
    /// The gateway did not run its transactions.
    #[error(transparent)]
    Gateway(#[from] GatewayError),
    /// A transaction was refused for a reason that a repetition does not change.
    #[error("a transaction of the lease was refused: {0}")]
    Refused(AbortReason),
    /// The keys of the lease could not be listed.
    #[error(transparent)]
    Scan(#[from] ScanFailed),
    /// The node's clock is wrong.
    #[error("the node's clock cannot be used: {0}")]
    Clock(#[from] ClockError),
    /// The system has no random numbers.
    #[error("the system has no random number for the lease's name")]
    NoRandomNumber,
    /// The lease has ended, and some of its keys are left.
    #[error(
        "the lease has ended, and its keys are deleted later, because they could not be yet: {0}"
    )]
    KeysLeft(String),
    /// Too few servers answered.
    #[error(
        "no majority of the servers answered within {} s; `status` in the shell shows which nodes are down",
        WITHIN.as_secs()
    )]
    Late,
}

/// A lease that lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Lease {
    /// How long it lives if nobody renews it.
    pub left: Duration,
    /// Attached keys, in their order; at most [`KEYS_SHOWN`].
    pub keys: Vec<Key>,
    /// True if there are more.
    pub has_more: bool,
}

/// What one look for leases that are due has found and done.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Swept {
    /// The number of due entries, also of leases that are not due yet; at most a list's length.
    pub entries: usize,
    /// The number of leases that were ended.
    pub ended: u64,
    /// The number of attached keys that were deleted.
    pub keys: u64,
}

impl Gateway {
    /// Grants a lease. Returns it with the timestamp of the transaction.
    ///
    /// # Errors
    /// See [`LeaseError`]. A lease that was granted without an answer ends by itself.
    pub async fn grant_lease(&self, ttl: Duration) -> Result<(LeaseId, Timestamp), LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::LOW);
        in_time(async {
            loop {
                // Another lease each time: what may have been granted before must not be granted again.
                let mut nonce = [0; 8];
                SystemRandom::new().fill(&mut nonce).map_err(|_| LeaseError::NoRandomNumber)?;
                let id = LeaseId::new(ttl, u64::from_be_bytes(nonce)).ok_or(LeaseError::Ttl)?;
                let now = self.backend().clock()?.now;
                let outcome = run_procedure(&mut txns, id.grant(now)).await?;
                if let Some(at) = committed(outcome)? {
                    return Ok((id, at));
                }
            }
        })
        .await
    }

    /// Renews a lease, for as long as it was granted for. Returns the timestamp of the transaction.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub async fn renew_lease(&self, id: LeaseId) -> Result<Timestamp, LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::LOW);
        in_time(async {
            loop {
                let now = self.backend().clock()?.now;
                let mut has_ended = false;
                let decide = |reads: &Reads| {
                    let writes = id.renew(now, reads);
                    has_ended = writes.is_none();
                    // A commit without writes shows that the lease has ended: a read may be old.
                    Decision::Commit(writes.unwrap_or_default())
                };
                let keys = id.renewal_keys(now);
                let outcome = run_interactive(&mut txns, keys, decide).await?;
                match committed(outcome)? {
                    None => {}
                    Some(_) if has_ended => return Err(LeaseError::Ended(id)),
                    Some(at) => return Ok(at),
                }
            }
        })
        .await
    }

    /// Revokes a lease, and deletes the keys that are still attached to it. Returns the number of keys that
    /// this call has deleted: 0 if the lease had ended before.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub async fn revoke_lease(&self, id: LeaseId) -> Result<u64, LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::HIGH);
        let revoked = in_time(async {
            loop {
                let due = self.backend().clock()?.now;
                let outcome = run_procedure(&mut txns, id.revoke(due)).await?;
                if committed(outcome)?.is_some() {
                    return Ok(due);
                }
            }
        });
        let due = revoked.await?;
        // If this fails, or this gateway dies, the next look for leases that are due goes on.
        let ended = self.end_lease(due, id).await;
        ended.map_err(|error| LeaseError::KeysLeft(error.to_string()))
    }

    /// A lease that lives, and what is attached to it.
    ///
    /// # Errors
    /// See [`LeaseError`].
    pub async fn lease(&self, id: LeaseId) -> Result<Lease, LeaseError> {
        in_time(self.look_at(id)).await
    }

    /// Ends the leases that are due, as far as it is up to this gateway.
    ///
    /// # Errors
    /// See [`LeaseError`]; some may have ended.
    pub async fn end_due_leases(&self) -> Result<Swept, LeaseError> {
        let scan = Scan { range: lease::all_due(), backwards: false, limit: LISTED };
        let page = self.list(scan).await?;
        let mut swept = Swept { entries: page.rows.len(), ..Swept::default() };
        let clock = self.backend().clock()?;
        let is_ours = |(due, id): &(Timestamp, LeaseId)| {
            clock.has_passed_everywhere(*due + OVERDUE)
                || (clock.has_passed_everywhere(*due) && self.backend().ends(*id))
        };
        let due = page.rows.iter().filter_map(|(key, _)| lease::parse_due(key)).filter(is_ours);
        let due: Vec<(Timestamp, LeaseId)> = due.collect();
        let mut ending = JoinSet::new();
        for some in due.chunks(lease::ENTRIES_AT_ONCE) {
            for (due, id) in self.without_renewed(some).await? {
                while ending.len() >= ENDED_AT_ONCE {
                    swept.count(ending.join_next().await);
                }
                let gateway = self.clone();
                ending.spawn(async move { (id, gateway.end_lease(due, id).await) });
            }
        }
        while let Some(ended) = ending.join_next().await {
            swept.count(Some(ended));
        }
        Ok(swept)
    }

    /// Removes due entries of leases that were renewed, and returns the others.
    async fn without_renewed(
        &self,
        due: &[(Timestamp, LeaseId)],
    ) -> Result<Vec<(Timestamp, LeaseId)>, LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::LOW);
        in_time(async {
            loop {
                let mut ends = Vec::new();
                let decide = |reads: &Reads| {
                    let (writes, ending) = lease::renewed(due, reads);
                    ends = ending;
                    Decision::Commit(writes)
                };
                let keys = lease::renewed_keys(due);
                let outcome = run_interactive(&mut txns, keys, decide).await?;
                if committed(outcome)?.is_some() {
                    return Ok(ends);
                }
            }
        })
        .await
    }

    /// Ends a lease with this due entry, unless it was renewed. Returns the number of attached keys
    /// that were deleted. With high priority, so that clients that attach keys all the time delay it
    /// less.
    async fn end_lease(&self, due: Timestamp, id: LeaseId) -> Result<u64, LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::HIGH);
        let mut ending = Ending::new(due, id);
        in_time(async {
            loop {
                let page = self.scan(ending.scan(), Priority::LOW).await?;
                let (mut writes, mut progress) = (Writes::new(), Progress::Again);
                let decide = |reads: &Reads| {
                    (writes, progress) = ending.decide(&page, reads);
                    Decision::Commit(writes.clone())
                };
                let outcome = run_interactive(&mut txns, ending.keys(&page), decide).await?;
                if outcome == Outcome::Aborted(AbortReason::TooLarge) && ending.shorten() {
                    continue;
                }
                if committed(outcome)?.is_none() {
                    ending.on_aborted();
                    continue;
                }
                ending.on_committed(&page, &writes);
                match progress {
                    Progress::Again => {}
                    Progress::Over | Progress::Renewed => return Ok(ending.deleted()),
                }
            }
        })
        .await
    }

    async fn look_at(&self, id: LeaseId) -> Result<Lease, LeaseError> {
        let mut txns = OwnTxns::new(self, Priority::LOW);
        let until = read(&mut txns, vec![id.until()]).await?;
        let until = lease::ends_at(until.get(&id.until())).ok_or(LeaseError::Ended(id))?;
        let scan = Scan { range: id.attachments(), backwards: false, limit: KEYS_SHOWN };
        let page = self.scan(scan, Priority::LOW).await?;
        let attached: Vec<Key> =
            page.rows.iter().filter_map(|(attachment, _)| id.attached(attachment)).collect();
        let mut keys = Vec::new();
        // In parts, because one message must hold the values.
        for (some, rows) in attached.chunks(8).zip(page.rows.chunks(8)) {
            let reads = read(&mut txns, some.to_vec()).await?;
            let held = some.iter().zip(rows);
            let held = held.filter(|(key, (_, at))| lease::is_attached(Some(at), reads.get(key)));
            keys.extend(held.map(|(key, _)| key.clone()));
        }
        let now = self.backend().clock()?.now;
        let left = Duration::from_nanos(until.0.saturating_sub(now.0));
        Ok(Lease { left, keys, has_more: page.rest.is_some() })
    }
}

impl Swept {
    fn count(&mut self, ended: Option<Result<EndedLease, tokio::task::JoinError>>) {
        match ended {
            None => {}
            Some(Ok((_, Ok(keys)))) => {
                self.ended += 1;
                self.keys += keys;
            }
            // The due entry is still there, and the next look finds it.
            Some(Ok((id, Err(error)))) => tracing::info!(%id, %error, "a lease ends later"),
            Some(Err(error)) => tracing::error!(%error, "the end of a lease was interrupted"),
        }
    }
}

/// A lease, and what became of its end.
type EndedLease = (LeaseId, Result<u64, LeaseError>);

async fn in_time<T>(running: impl Future<Output = Result<T, LeaseError>>) -> Result<T, LeaseError> {
    tokio::time::timeout(WITHIN, running).await.unwrap_or(Err(LeaseError::Late))
}

async fn read(txns: &mut OwnTxns<'_>, keys: Vec<Key>) -> Result<Reads, LeaseError> {
    loop {
        let finished = txns.read(keys.clone()).await?;
        if committed(finished.outcome)?.is_some() {
            return Ok(finished.reads.unwrap_or_default());
        }
    }
}

async fn run_procedure(txns: &mut OwnTxns<'_>, ops: Vec<Op>) -> Result<Outcome, GatewayError> {
    let make = |txn, home| Txn::procedure(txn, home, ops);
    Ok(txns.run(make, |_| Decision::Abort).await?.outcome)
}

async fn run_interactive(
    txns: &mut OwnTxns<'_>,
    keys: lease::Keys,
    decide: impl FnOnce(&Reads) -> Decision,
) -> Result<Outcome, GatewayError> {
    let lease::Keys { reads, writes } = keys;
    let make = |txn, home| Txn::interactive(txn, home, reads, writes);
    Ok(txns.run(make, decide).await?.outcome)
}

/// The timestamp of a commit; none if the transaction must run again, as all of leases may.
fn committed(outcome: Outcome) -> Result<Option<Timestamp>, LeaseError> {
    match outcome {
        Outcome::Committed(at) => Ok(Some(at)),
        Outcome::Unknown
        | Outcome::Aborted(
            AbortReason::Conflict
            | AbortReason::StaleRead
            | AbortReason::Recovery
            | AbortReason::Abandoned
            | AbortReason::Overload,
        ) => Ok(None),
        Outcome::Aborted(
            reason @ (AbortReason::Client
            | AbortReason::Guard
            | AbortReason::Invalid
            | AbortReason::TooLarge),
        ) => Err(LeaseError::Refused(reason)),
    }
}
