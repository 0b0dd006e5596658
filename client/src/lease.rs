//! Leases: keys that are deleted when their owner does not renew the lease any more.

use std::time::Duration;

use orthodrome_core::Timestamp;
use orthodrome_core::lease::LeaseId;
use orthodrome_core::txn::{Key, Value};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tonic::Request;

use crate::gateway::{Answer, Failure, Stubs};
use crate::general::GeneralTxn;
use crate::pace::Pace;
use crate::values::{Reads, Writes};
use crate::wire::api;
use crate::{Abort, Client, Error, Transaction};

/// A lease that lives.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeaseInfo {
    /// How long it lives if nobody renews it.
    pub left: Duration,
    /// Attached keys, in order.
    pub keys: Vec<Key>,
    /// True if more keys are attached than an answer shows.
    pub has_more: bool,
}

impl Client {
    /// Grants a lease. It ends when nobody has renewed it for `ttl`, which is between a second and a
    /// year; then the keys that are attached to it are deleted.
    ///
    /// ```no_run
    /// # async fn example(client: orthodrome_client::Client) -> Result<(), orthodrome_client::Error> {
    /// use std::time::Duration;
    /// use orthodrome_client::Op;
    /// let lease = client.grant_lease(Duration::from_secs(10)).await?;
    /// // Take the lock if it is free. It becomes free when this process is gone.
    /// let mut ops = vec![Op::Compare("lock".into(), None)];
    /// ops.extend(lease.put("lock".into(), "me".into()));
    /// let outcome = client.execute(ops).await?;
    /// let mut kept = client.keep_lease(lease).await?;
    /// // Work; stop when `kept.ended()` returns.
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`Error`] says. If the answer was lost, a lease may have been granted; it ends by itself.
    pub async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, Error> {
        let ttl_ms = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
        let request = api::GrantLeaseRequest { ttl_ms, ..Default::default() };
        let granted = self.call_lease(request, Stubs::grant_lease).await?;
        let id: LeaseId = granted.lease.parse().map_err(|error| {
            Error::Unexpected(format!("the gateway granted a lease with a strange name: {error}"))
        })?;
        // So that this client's transactions find the lease.
        let written = Writes::new().put(id.record(), Value::default());
        self.inner.learn_commit(Timestamp(granted.timestamp), None, &written);
        Ok(id)
    }

    /// Renews a lease: from now on it lives for as long as it was granted for.
    ///
    /// # Errors
    /// [`Error::LeaseEnded`] if it has ended; otherwise as [`Error`] says, and it may be renewed.
    pub async fn renew_lease(&self, lease: LeaseId) -> Result<(), Error> {
        let request = api::RenewLeaseRequest { lease: lease.to_string(), ..Default::default() };
        self.call_lease(request, Stubs::renew_lease).await?;
        Ok(())
    }

    /// Revokes a lease, and deletes the keys that are still attached to it. Returns the number of keys that
    /// this call has deleted: 0 if the lease had ended before.
    ///
    /// # Errors
    /// As [`Error`] says. The lease may have ended. A gateway deletes the remaining keys soon.
    pub async fn revoke_lease(&self, lease: LeaseId) -> Result<u64, Error> {
        let request = api::RevokeLeaseRequest { lease: lease.to_string(), ..Default::default() };
        Ok(self.call_lease(request, Stubs::revoke_lease).await?.keys)
    }

    /// How long a lease lives, and what is attached to it.
    ///
    /// # Errors
    /// [`Error::LeaseEnded`] if it has ended; otherwise as [`Error`] says.
    pub async fn lease(&self, lease: LeaseId) -> Result<LeaseInfo, Error> {
        let request = api::DescribeLeaseRequest { lease: lease.to_string(), ..Default::default() };
        let answer = self.call_lease(request, Stubs::describe_lease).await?;
        let keys = answer.keys.into_iter().map(Key::from).collect();
        let left = Duration::from_millis(answer.left_ms);
        Ok(LeaseInfo { left, keys, has_more: answer.has_more })
    }

    /// Renews a lease, and goes on to do so in the background until the result is dropped.
    ///
    /// # Errors
    /// As [`Client::renew_lease`].
    pub async fn keep_lease(&self, lease: LeaseId) -> Result<KeptLease, Error> {
        let asked = Instant::now();
        self.renew_lease(lease).await?;
        let client = self.clone();
        let task = tokio::spawn(async move { client.keep(lease, asked).await });
        Ok(KeptLease { lease, task })
    }

    /// Renews the lease, which was renewed after `asked`, until it has ended or must be taken for ended.
    async fn keep(self, lease: LeaseId, asked: Instant) -> Error {
        let ttl = Duration::from_millis(u64::try_from(lease.ttl().as_millis()).unwrap_or(u64::MAX));
        let mut ends = asked + ttl;
        let mut last = format!("the lease {lease} was not renewed in time");
        loop {
            tokio::time::sleep_until(ends.min(Instant::now() + ttl / 3)).await;
            let asked = Instant::now();
            match tokio::time::timeout_at(ends, self.renew_lease(lease)).await {
                Ok(Ok(())) => ends = asked + ttl,
                Ok(Err(ended @ Error::LeaseEnded(_))) => return ended,
                Ok(Err(error)) => last = format!("the lease {lease} was not renewed: {error}"),
                Err(_) => return Error::LeaseEnded(last),
            }
        }
    }

    /// Sends a request about a lease until it is answered. Each of them may be repeated.
    async fn call_lease<Q: Clone, A>(
        &self,
        request: Q,
        rpc: fn(Stubs, Request<Q>) -> Answer<A>,
    ) -> Result<A, Error> {
        let mut pace = Pace::new(self.inner.deadline);
        loop {
            let at = self.inner.gateways.current();
            match self.inner.gateways.send(at, pace.deadline, request.clone(), rpc).await {
                Ok(answer) => return Ok(answer),
                Err(Failure::NotOpen(text)) => return Err(Error::LeaseEnded(text)),
                Err(failure) => self.inner.after_failure(at, failure, &mut pace).await?,
            }
        }
    }
}

/// A lease that is renewed in the background until this is dropped. Then it lives for as long as it was
/// granted for; [`Client::revoke_lease`] ends it at once.
#[derive(Debug)]
pub struct KeptLease {
    lease: LeaseId,
    task: JoinHandle<Error>,
}

impl KeptLease {
    /// The lease.
    #[must_use]
    pub fn id(&self) -> LeaseId {
        self.lease
    }

    /// Returns when the lease has ended, or could not be renewed for so long that it may have ended. Its
    /// owner must then stop doing what it needs the lease for.
    pub async fn ended(&mut self) -> Error {
        (&mut self.task).await.unwrap_or_else(|error| {
            Error::Unexpected(format!("the renewal of the lease was interrupted: {error}"))
        })
    }
}

impl Drop for KeptLease {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Transaction {
    /// May write this key and attach it to a lease, with [`Writes::put_attached`].
    pub fn attach(self, lease: LeaseId, key: impl Into<Key>) -> Self {
        let key = key.into();
        self.read(lease.record()).write(lease.attachment(&key)).write(key)
    }
}

impl Writes {
    /// Sets a key that [`Transaction::attach`] has declared, and attaches it to the lease.
    ///
    /// # Errors
    /// The lease has ended, or the key was not declared in this way. The transaction must not commit.
    pub fn put_attached(
        self,
        lease: LeaseId,
        reads: &Reads,
        key: impl Into<Key>,
        value: impl Into<Value>,
    ) -> Result<Self, Abort> {
        if reads.get(lease.record()).is_none() {
            return Err(has_ended(lease));
        }
        let key = key.into();
        Ok(self.put(lease.attachment(&key), Value::default()).put(key, value))
    }
}

impl GeneralTxn {
    /// Sets a key and attaches it to a lease. Reads whether the lease lives.
    ///
    /// # Errors
    /// The lease has ended, or the transaction cannot continue.
    pub async fn put_attached(
        &self,
        lease: LeaseId,
        key: impl Into<Key>,
        value: impl Into<Value>,
    ) -> Result<(), Abort> {
        if self.get(lease.record()).await?.is_none() {
            return Err(has_ended(lease));
        }
        let key = key.into();
        self.put(lease.attachment(&key), Value::default());
        self.put(key, value);
        Ok(())
    }
}

fn has_ended(lease: LeaseId) -> Abort {
    Abort::because(format!("the lease {lease} has ended"))
}
