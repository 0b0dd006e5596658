//! Watches of ranges of keys.

use std::sync::Arc;
use std::time::Duration;

use orthodrome_core::Timestamp;
use orthodrome_core::scan::KeyRange;
use orthodrome_core::txn::Read;
use orthodrome_core::watch::Change;
use tonic::{Code, Streaming};

use crate::client::Inner;
use crate::gateway::{Failure, Stubs, failure};
use crate::pace::Pace;
use crate::values::{Reads, Writes};
use crate::wire::{self, api};
use crate::{Client, Error};

/// How long a gateway may say nothing before another one is asked. Gateways say every second how far
/// they have come.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// A watch of a range of keys, made with [`Client::watch`]. [`Watch::next`] returns the changes, one
/// batch after the other. It continues at another gateway when its own one fails: then, too, nothing is
/// missing, and nothing comes twice.
#[derive(Debug)]
pub struct Watch {
    client: Arc<Inner>,
    range: KeyRange,
    after: Option<Timestamp>,
    keys_only: bool,
    deadline: Duration,
    open: Option<Open>,
}

/// The answers of one gateway.
#[derive(Debug)]
struct Open {
    at: usize,
    answers: Streaming<api::WatchResponse>,
    /// The part of the next batch that has arrived.
    changes: Vec<Change>,
    /// It has answered.
    is_alive: bool,
}

/// The next changes of a watch.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Changes {
    /// The changes in the order of their commit timestamps; those of one transaction are together. Without
    /// a value the key was deleted, unless the watch is of keys only. There may be none.
    pub changes: Vec<Change>,
    /// Up to here the watch has returned everything. To continue later, in another process: [`Watch::after`]
    /// this timestamp.
    pub through: Timestamp,
}

impl Client {
    /// Watches a range of keys: returns all changes from now on. For all keys and all that follows, wait for
    /// the first [`Changes`], and then scan the range. [`KeyRange::prefix`] is the range of all
    /// keys with a prefix; [`KeyRange::default()`] has all keys.
    #[must_use = "call `next`"]
    pub fn watch(&self, range: KeyRange) -> Watch {
        let (client, deadline) = (Arc::clone(&self.inner), self.inner.deadline);
        Watch { client, range, after: None, keys_only: false, deadline, open: None }
    }
}

impl Watch {
    /// Returns all changes after this timestamp, and not only those from now on: that of the last
    /// [`Changes`] of another watch. Servers remember changes for some time only. With some protocols the
    /// timestamp of a commit says nothing about what was acknowledged before or after it.
    #[must_use = "call `next`"]
    pub fn after(mut self, timestamp: Timestamp) -> Self {
        self.after = Some(timestamp);
        self
    }

    /// Leaves the values out. A deletion cannot be told from a new value then.
    #[must_use = "call `next`"]
    pub fn keys_only(mut self) -> Self {
        self.keys_only = true;
        self
    }

    /// How long the watch tries to reach a gateway before it gives up. The default is that of the client.
    #[must_use = "call `next`"]
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// The next changes. The first call returns once the watch has begun: every transaction that begins
    /// afterwards will be shown. If the future is dropped, nothing is lost.
    ///
    /// # Errors
    /// [`Error::Forgotten`] if the servers do not remember all changes; otherwise as a scan. After an error
    /// that passes, another call continues the watch.
    pub async fn next(&mut self) -> Result<Changes, Error> {
        if self.range.is_empty() {
            let text = "the end of the range is not after its beginning, so no key can be in it";
            return Err(Error::Invalid(text.into()));
        }
        let mut pace = Pace::new(self.deadline);
        loop {
            let open = match &mut self.open {
                Some(open) => open,
                closed => {
                    let (at, ..) = self.client.home(&mut pace).await?;
                    let request = api::WatchRequest {
                        from: self.range.from.to_bytes(),
                        until: self.range.until.as_ref().map(|until| until.to_bytes()),
                        after: self.after.map(|after| after.0),
                        keys_only: self.keys_only,
                        ..Default::default()
                    };
                    let gateways = &self.client.gateways;
                    match gateways.send(at, pace.deadline, request, Stubs::watch).await {
                        Ok(answers) => closed.insert(Open {
                            at,
                            answers,
                            changes: Vec::new(),
                            is_alive: false,
                        }),
                        Err(failed) => {
                            self.client.after_failure(at, failed, &mut pace).await?;
                            continue;
                        }
                    }
                }
            };
            let at = open.at;
            let failed = match tokio::time::timeout(SILENCE_MAX, open.answers.message()).await {
                Ok(Ok(Some(answer))) => {
                    open.is_alive = true;
                    open.changes.extend(answer.changes.into_iter().map(change));
                    if answer.through == 0 {
                        continue;
                    }
                    let changes = std::mem::take(&mut open.changes);
                    let through = Timestamp(answer.through);
                    self.after = Some(through);
                    self.learn(&changes);
                    return Ok(Changes { changes, through });
                }
                Ok(Err(status)) if status.code() == Code::OutOfRange => {
                    self.open = None;
                    return Err(Error::Forgotten(status.message().to_owned()));
                }
                Ok(Err(status)) => failure(self.client.gateways.endpoint(at), &status),
                Ok(Ok(None)) => Failure::Unavailable("the gateway ended the watch".into()),
                Err(_) => Failure::Lost("the gateway has said nothing for too long".into()),
            };
            if self.open.take().is_some_and(|open| open.is_alive) {
                // The time to reach another gateway begins now.
                pace = Pace::new(self.deadline);
            }
            self.client.after_failure(at, failed, &mut pace).await?;
        }
    }

    /// Later reads of this client are not older than what the watch has shown.
    fn learn(&self, changes: &[Change]) {
        if self.keys_only {
            return;
        }
        let read = |change: &Change| {
            let Change { key, version, value } = change.clone();
            (key, Read { value, version })
        };
        let Some(last) = changes.last() else { return };
        let reads = Reads(changes.iter().map(read).collect());
        self.client.learn_commit(last.version.timestamp, Some(&reads), &Writes::new());
    }
}

fn change(change: api::KeyRead) -> Change {
    let (key, read) = wire::read(change);
    Change { key, version: read.version, value: read.value }
}
