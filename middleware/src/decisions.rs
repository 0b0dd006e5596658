//! The decision log: a thread that writes the records of a middleware, with one sync for all queued
//! records. A proxy keeps no versions of data, so it needs a log but no state engine.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;

use bytes::Bytes;
use orthodrome_core::Ticket;

use orthodrome_server::inbox::Inbox;
use orthodrome_server::storage::directory::Directory;
use orthodrome_server::storage::log::{Log, Options, Position, Record};
use orthodrome_server::storage::{Expected, Identity, StorageError};

/// The tag of the log's only owner.
const TAG: u8 = 1;

/// The file with the unique name of the decision log.
const NAME: &str = "log-name";

/// The recovered contents of a directory.
pub(crate) struct Found {
    /// The name of the log. It is unique, except for copies of the log.
    pub(crate) name: String,
    pub(crate) records: Vec<Bytes>,
    /// The place where the log was cut off, and the reason, if it was.
    pub(crate) torn: Option<String>,
}

/// A task for the thread; tasks are executed in order.
#[derive(Debug)]
pub(crate) enum Work {
    /// Append a record.
    Persist(Ticket, Bytes),
    /// Replace all earlier records.
    Checkpoint(Ticket, Vec<Bytes>),
}

/// A handle on the thread. Dropping it ends the thread without writing queued records, as a crash
/// would.
#[derive(Debug)]
pub(crate) struct Decisions {
    inbox: Arc<Inbox<Work>>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Decisions {
    fn drop(&mut self) {
        self.inbox.close();
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by the panic hook.
            let _ = thread.join();
        }
    }
}

/// What the thread reports.
#[derive(Debug)]
pub(crate) enum Report {
    /// All records up to this ticket are durable.
    Durable(Ticket),
    /// The thread has ended; nothing more becomes durable.
    Failed(StorageError),
}

impl Decisions {
    /// Locks the directory, reads its contents, and starts the thread. `report` is called on the
    /// thread.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub(crate) fn open(
        path: &Path,
        identity: &Identity,
        report: impl Fn(Report) + Send + 'static,
    ) -> Result<(Self, Found), StorageError> {
        let mut directory = Directory::open(path, identity, "middleware", Expected::Either)?;
        let options = Options {
            sync: true,
            segment_bytes: 16 << 20,
            durable: Position::default(),
            hook: None,
        };
        let (log, records, torn);
        let name;
        if directory.is_new() {
            log = Log::create(&directory.log(), identity, options)?;
            name = write_name(path)?;
            directory.finish()?;
            (records, torn) = (Vec::new(), None);
        } else {
            let found;
            name = read_name(path)?;
            (log, found) = Log::open(&directory.log(), identity, options)?;
            torn = found.torn.map(|(path, offset, why)| {
                format!("{}: cut off at offset {offset}: {why}", path.display())
            });
            records = found.records.into_iter().map(|record| record.bytes).collect();
        }
        let inbox: Arc<Inbox<Work>> = Arc::default();
        let queue = inbox.clone();
        let thread = std::thread::Builder::new().name("decisions".into()).spawn(move || {
            // The lock is held as long as the thread runs.
            let _directory = directory;
            if let Err(error) = write(log, &queue, &report) {
                queue.close();
                report(Report::Failed(error));
            }
        });
        let thread = thread.map_err(|error| StorageError::Io {
            action: "start a thread for",
            path: path.to_owned(),
            source: error,
        })?;
        Ok((Self { inbox, thread: Some(thread) }, Found { name, records, torn }))
    }

    /// Queues work. After a failure it is dropped, because the process is stopping.
    pub(crate) fn submit(&self, work: Work) {
        self.inbox.push(work);
    }
}

/// Gives the log in this directory a name, durably.
fn write_name(directory: &Path) -> Result<String, StorageError> {
    let file = directory.join(NAME);
    let name = super::auth::random_name();
    let written = File::create(&file)
        .and_then(|mut file| file.write_all(name.as_bytes()).and_then(|()| file.sync_all()))
        .and_then(|()| File::open(directory)?.sync_all());
    match written {
        Ok(()) => Ok(name),
        Err(source) => Err(StorageError::Io { action: "write", path: file, source }),
    }
}

/// Reads the log's name. A log of an older version, which had no names, gets one.
fn read_name(directory: &Path) -> Result<String, StorageError> {
    let file = directory.join(NAME);
    match fs::read_to_string(&file) {
        Ok(name) if name.len() == 32 => Ok(name),
        Ok(_) => write_name(directory),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => write_name(directory),
        Err(source) => Err(StorageError::Io { action: "read", path: file, source }),
    }
}

fn write(mut log: Log, queue: &Inbox<Work>, report: &impl Fn(Report)) -> Result<(), StorageError> {
    let mut work = Vec::new();
    while queue.drain(&mut work, usize::MAX, None) {
        let mut last = None;
        for item in work.drain(..) {
            match item {
                Work::Persist(ticket, record) => {
                    log.add(TAG, &record)?;
                    last = Some(ticket);
                    if log.is_full() {
                        log.commit()?;
                    }
                }
                Work::Checkpoint(ticket, records) => {
                    log.commit()?;
                    let number = log.rotate()?;
                    let first = log.sequence();
                    let records: Vec<Record> =
                        records.into_iter().map(|bytes| Record { tag: TAG, bytes }).collect();
                    log.checkpoint(number, first, &records)?;
                    last = Some(ticket);
                }
            }
        }
        log.commit()?;
        if let Some(ticket) = last {
            report(Report::Durable(ticket));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    #[test]
    fn what_is_reported_durable_is_there_again() {
        let dir = tempfile::tempdir().unwrap();
        let identity = Identity { cluster: "test".into(), node: orthodrome_core::NodeId(1) };
        let names = std::cell::RefCell::new(orthodrome_core::ordered::OrdSet::new());
        let open = || {
            let (say, said) = mpsc::channel();
            let (log, Found { name, records, torn }) =
                Decisions::open(&dir.path().join("log"), &identity, move |report| {
                    say.send(report).unwrap()
                })
                .unwrap();
            assert!(torn.is_none());
            names.borrow_mut().insert(name);
            (log, records, said)
        };
        let wait = |said: &mpsc::Receiver<Report>, until: u64| {
            while !matches!(said.recv().unwrap(), Report::Durable(Ticket(n)) if n >= until) {}
        };
        let (log, records, said) = open();
        assert!(records.is_empty());
        (1..=5).for_each(|n| log.submit(Work::Persist(Ticket(n), Bytes::from(vec![n as u8]))));
        wait(&said, 5);
        drop(log);
        let (log, records, said) = open();
        let bytes: Vec<Vec<u8>> = records.iter().map(|record| record.to_vec()).collect();
        assert_eq!(bytes, [[1], [2], [3], [4], [5]]);
        log.submit(Work::Checkpoint(Ticket(1), vec![Bytes::from_static(b"five")]));
        log.submit(Work::Persist(Ticket(2), Bytes::from_static(b"six")));
        wait(&said, 2);
        drop(log);
        let bytes: Vec<Vec<u8>> = open().1.iter().map(|record| record.to_vec()).collect();
        assert_eq!(bytes, [b"five".to_vec(), b"six".to_vec()]);
        assert_eq!(names.borrow().len(), 1, "a log keeps its name");
    }
}
