//! The audit log of a node: who gave which order, from where, and what came of it.
//!
//! Each line is one JSON object. An order is on disk before the node sees it: an order that cannot
//! be written down is not carried out. The file is opened for each line, so that it can be moved
//! away at any time, as `logrotate` does.

use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use orthodrome_core::NodeId;
use orthodrome_core::machine::Admin;
use serde::Serialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// What happened.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
#[serde(tag = "event", rename_all = "kebab-case")]
#[cfg_attr(test, allow(dead_code, reason = "the process of a node is not part of unit tests"))]
pub(crate) enum Event {
    /// The process serves. `data` says what it expected to find: `existing` data, or none, because
    /// the operator said `new-cluster` or `replace`.
    Start { version: &'static str, data: &'static str },
    /// The process ends.
    Stop { why: String },
    /// Somebody gave an order. A line with the same number says what came of it.
    Order {
        number: u64,
        #[serde(flatten)]
        by: By,
        #[serde(flatten)]
        order: Order,
    },
    /// The node took the order.
    Accepted { number: u64 },
    /// The node did not take the order, which has no effect.
    Rejected { number: u64, why: String },
    /// The node stopped before it said whether it takes the order.
    Unknown { number: u64, why: String },
    /// The order never reached the node: its sender may not give it, or it makes no sense.
    Denied {
        #[serde(flatten)]
        by: By,
        order: &'static str,
        why: String,
    },
}

/// The sender of an order.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
pub(crate) struct By {
    pub(crate) principal: String,
    /// The other end of the connection.
    pub(crate) address: Option<SocketAddr>,
}

/// An order as the log shows it.
#[derive(Serialize, Clone, PartialEq, Eq, Debug)]
#[serde(tag = "order", rename_all = "kebab-case")]
pub(crate) enum Order {
    TransferLeader { partition: String, to: String },
    ChangeMembers { partition: String, voters: Vec<String>, learners: Vec<String> },
}

impl From<&Admin> for Order {
    fn from(order: &Admin) -> Self {
        let names = |nodes: &[NodeId]| nodes.iter().map(NodeId::to_string).collect();
        match order {
            Admin::TransferLeader { partition, to } => {
                Self::TransferLeader { partition: partition.to_string(), to: to.to_string() }
            }
            Admin::ChangeMembers { partition, voters, learners } => Self::ChangeMembers {
                partition: partition.to_string(),
                voters: names(voters),
                learners: names(learners),
            },
        }
    }
}

#[derive(Serialize)]
struct Line<'a> {
    time: String,
    node: String,
    #[serde(flatten)]
    event: &'a Event,
}

/// The audit log of a node. Clones write to the same file.
#[derive(Clone, Debug)]
pub struct AuditLog {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    path: PathBuf,
    node: NodeId,
    /// Orders since the start of the process.
    orders: AtomicU64,
    /// Held while a line is written, so that lines do not mix.
    writing: Mutex<()>,
}

impl AuditLog {
    /// The log at `path`, which is created if it does not exist.
    ///
    /// # Errors
    /// The file cannot be opened for writing.
    pub fn open(path: &Path, node: NodeId) -> io::Result<Self> {
        OpenOptions::new().create(true).append(true).open(path)?;
        let (path, orders, writing) = (path.to_owned(), AtomicU64::new(0), Mutex::new(()));
        Ok(Self { inner: Arc::new(Inner { path, node, orders, writing }) })
    }

    /// The number of the next order.
    pub(crate) fn number(&self) -> u64 {
        self.inner.orders.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Writes a line, and returns when it is on disk.
    ///
    /// # Errors
    /// Why the line is not on disk. It names the file.
    pub(crate) async fn write(&self, event: Event) -> Result<(), String> {
        let inner = Arc::clone(&self.inner);
        let written = tokio::task::spawn_blocking(move || {
            inner.write(&event).map_err(|error| format!("{}: {error}", inner.path.display()))
        });
        written.await.unwrap_or_else(|panicked| Err(panicked.to_string()))
    }

    /// Writes a line about something that cannot be refused any more; a failure is only logged.
    pub(crate) async fn note(&self, event: Event) {
        let text = format!("{event:?}");
        if let Err(error) = self.write(event).await {
            tracing::error!(error, event = text, "cannot write the audit log");
        }
    }
}

impl Inner {
    fn write(&self, event: &Event) -> io::Result<()> {
        let _writing = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        let time = OffsetDateTime::now_utc().format(&Rfc3339).map_err(io::Error::other)?;
        let line = Line { time, node: self.node.to_string(), event };
        let mut text = serde_json::to_string(&line)?;
        text.push('\n');
        let mut file = OpenOptions::new().create(true).append(true).open(&self.path)?;
        file.write_all(text.as_bytes())?;
        file.sync_data()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may stop at the first surprise")]

    use orthodrome_core::PartitionId;

    use super::*;

    #[tokio::test]
    async fn a_line_is_added_for_each_event_also_after_the_file_was_moved_away() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("audit.jsonl");
        std::fs::write(&path, "{}\n").unwrap();
        let log = AuditLog::open(&path, NodeId(3)).unwrap();
        let by = By { principal: "root".into(), address: Some(([10, 0, 0, 1], 4242).into()) };
        let order = Admin::ChangeMembers {
            partition: PartitionId(2),
            voters: vec![NodeId(1)],
            learners: vec![NodeId(4)],
        };
        let number = log.number();
        log.write(Event::Order { number, by, order: (&order).into() }).await.unwrap();
        std::fs::rename(&path, directory.path().join("audit.jsonl.1")).unwrap();
        log.write(Event::Rejected { number, why: "not now".into() }).await.unwrap();
        let read = |name: &str| std::fs::read_to_string(directory.path().join(name)).unwrap();
        let (first, second) = (read("audit.jsonl.1"), read("audit.jsonl"));
        let (kept, added) = first.split_once('\n').unwrap();
        assert_eq!(kept, "{}", "earlier lines stay");
        let without_time = |line: &str| line.split_once(r#","node""#).unwrap().1.to_owned();
        assert_eq!(
            without_time(added),
            r#":"n3","event":"order","number":1,"principal":"root","address":"10.0.0.1:4242","order":"change-members","partition":"p2","voters":["n1"],"learners":["n4"]}"#.to_owned() + "\n"
        );
        assert_eq!(
            without_time(&second),
            r#":"n3","event":"rejected","number":1,"why":"not now"}"#.to_owned() + "\n"
        );
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_written_is_named() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("logs/audit.jsonl");
        assert!(AuditLog::open(&path, NodeId(1)).is_err());
        std::fs::create_dir(directory.path().join("logs")).unwrap();
        let log = AuditLog::open(&path, NodeId(1)).unwrap();
        std::fs::remove_dir_all(directory.path().join("logs")).unwrap();
        let error = log.write(Event::Accepted { number: 1 }).await.unwrap_err();
        assert!(error.contains("logs/audit.jsonl"), "{error}");
    }
}
