//! Scans of ranges of keys.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::Timestamp;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::txn::{Key, Op, Priority, Value, Version};

use crate::client::Inner;
use crate::gateway::{Failure, Stubs};
use crate::outcome::AbortReason;
use crate::pace::Pace;
use crate::values::Writes;
use crate::wire::{self, api};
use crate::{Client, Error, Outcome};

/// A scan of a range of keys, made with [`Client::scan`]. Await it to get one page.
#[derive(Clone, Debug)]
#[must_use = "await the scan"]
pub struct Scan {
    client: Arc<Inner>,
    range: KeyRange,
    is_backwards: bool,
    limit: u32,
    keys_only: bool,
    priority: Priority,
    deadline: Duration,
}

/// One key of a page.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Row {
    /// The key.
    pub key: Key,
    /// Its value; none in a scan of keys only.
    pub value: Option<Value>,
    /// Its version.
    pub version: Version,
}

/// The keys of a range, or of its first part, at one moment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Page {
    /// The moment.
    pub timestamp: Timestamp,
    /// The keys that have a value, in order. It may be empty although more keys follow.
    pub rows: Vec<Row>,
    /// The rest of the range, if it may have more keys. [`Client::scan`] of it gives the next page,
    /// at a later moment.
    pub rest: Option<KeyRange>,
}

impl Client {
    /// Scans a range of keys in order, as one consistent snapshot: the page has every key of its part
    /// of the range, up to its `rest`, and transactions are shown as a whole or not at all.
    /// [`KeyRange::prefix`] is the range of all keys with a prefix; `KeyRange::default()` has all keys.
    pub fn scan(&self, range: KeyRange) -> Scan {
        Scan {
            client: Arc::clone(&self.inner),
            range,
            is_backwards: false,
            limit: 0,
            keys_only: false,
            priority: Priority::LOW,
            deadline: self.inner.deadline,
        }
    }

    /// The number of keys in a range. A range of more keys than fit into one page is counted page by
    /// page, each at its own moment.
    ///
    /// # Errors
    /// As a scan.
    pub async fn count(&self, range: KeyRange) -> Result<u64, Error> {
        let (mut count, mut rest) = (0, Some(range));
        while let Some(range) = rest {
            let page = self.scan(range).keys_only().await?;
            count += page.rows.len() as u64;
            rest = page.rest;
        }
        Ok(count)
    }

    /// Deletes every key of a range, and returns how many had a value. It deletes page by page, each
    /// page in one transaction; so others may see a part of it, and a key that is created while it
    /// runs may stay.
    ///
    /// # Errors
    /// As a scan or a transaction; the pages before may be deleted.
    pub async fn delete_range(&self, range: KeyRange) -> Result<u64, Error> {
        let (mut count, mut rest) = (0, Some(range));
        while let Some(range) = rest {
            let page = self.scan(range).limit(DELETED_AT_ONCE).keys_only().await?;
            rest = page.rest;
            if page.rows.is_empty() {
                continue;
            }
            let deleted = page.rows.len() as u64;
            match self.execute(page.rows.into_iter().map(|row| Op::Delete(row.key))).await? {
                Outcome::Committed(_) => count += deleted,
                Outcome::Aborted(aborted) => return Err(Error::Aborted(aborted.reason)),
                Outcome::Unknown(doubt) => return Err(Error::Deadline(doubt.trouble().to_owned())),
            }
        }
        Ok(count)
    }
}

/// The number of keys that one transaction of [`Client::delete_range`] deletes.
const DELETED_AT_ONCE: u32 = 128;

impl Scan {
    /// From the last key of the range to the first.
    pub fn backwards(mut self) -> Self {
        self.is_backwards = true;
        self
    }

    /// Sets the largest number of keys in the page; the gateway may return fewer. By default as many
    /// as one transaction may read.
    pub fn limit(mut self, keys: u32) -> Self {
        self.limit = keys;
        self
    }

    /// Leaves the values out.
    pub fn keys_only(mut self) -> Self {
        self.keys_only = true;
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

    async fn run(self) -> Result<Page, Error> {
        let Self { client, range, is_backwards, limit, keys_only, priority, deadline } = self;
        if range.is_empty() {
            let text = "the end of the range is not after its beginning, so no key can be in it";
            return Err(Error::Invalid(text.into()));
        }
        let mut pace = Pace::new(deadline);
        let request = api::ScanRequest {
            from: range.from.to_bytes(),
            until: range.until.map(|until| until.to_bytes()),
            backwards: is_backwards,
            limit,
            keys_only,
            priority: wire::priority(priority)?,
            ..Default::default()
        };
        loop {
            // The gateway's limits say how large an answer can be.
            let (at, ..) = client.home(&mut pace).await?;
            let sent = client.gateways.send(at, pace.deadline, request.clone(), Stubs::scan).await;
            let answer = match sent {
                Ok(answer) => answer,
                // A scan has no effect, so it may be repeated after any failure.
                Err(failure @ Failure::Never(_)) => return Err(failure.into_error()),
                Err(failure) => {
                    client.after_failure(at, failure, &mut pace).await?;
                    continue;
                }
            };
            let timestamp = Timestamp(answer.timestamp);
            let key = |read: &api::KeyRead| Key::from(&read.key);
            let order: Vec<Key> = answer.rows.iter().map(key).collect();
            let mut reads = wire::reads(answer.rows);
            if !keys_only {
                if client.session().is_ahead_of_snapshot(&reads.0, timestamp) {
                    if !pace.pause().await {
                        return Err(Error::Aborted(AbortReason::StaleRead));
                    }
                    continue;
                }
                client.learn_commit(timestamp, Some(&reads), &Writes::new());
            }
            let row = |key: Key| {
                let read = reads.0.remove(&key)?;
                Some(Row { key, value: read.value, version: read.version })
            };
            let rows = order.into_iter().filter_map(row).collect();
            let rest = answer.rest.map(|rest| KeyRange {
                from: Key::from(rest.from),
                until: rest.until.map(Key::from),
            });
            return Ok(Page { timestamp, rows, rest });
        }
    }
}

impl IntoFuture for Scan {
    type Output = Result<Page, Error>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}
