//! The only thread that writes: it takes all queued work, appends it, syncs once, and reports.

use std::collections::hash_map::RandomState;
use std::hash::{BuildHasher as _, Hasher as _};
use std::panic::AssertUnwindSafe;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use orthodrome_core::id::ClientId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::store::Memtable;
use orthodrome_core::{Ticket, Timestamp};
use tokio::sync::oneshot;

use super::directory::{Ceilings, Directory, Values};
use super::engine::Engine;
use super::log::{Hook, Log, Options, Position, Record};
use super::{Expected, Founders, Identity, Placement, StorageError};
use crate::inbox::Inbox;

/// The owner of a record.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Tag {
    /// The server machine.
    Server,
    /// The gateway machine.
    Gateway,
}

const SERVER: u8 = 1;
const GATEWAY: u8 = 2;
/// A checkpoint with all current records of the gateway, which replace the earlier ones.
const GATEWAY_CHECKPOINT: u8 = 3;

/// Number of client ids that one durable write reserves.
const CLIENTS: u64 = 4096;
/// The numbers of clients that a start skips are drawn below this: as many as pass in three days.
const SKIPPED_MAX: u64 = 1 << 26;
/// The same, once skipped numbers run [`AHEAD_MAX`] ahead of time: as many as pass in 17 minutes.
const SKIPPED_MAX_AHEAD: u64 = 1 << 18;
/// As many numbers as pass in 97 days.
const AHEAD_MAX: u64 = 1 << 31;

/// Settings of a node's storage.
pub struct Settings {
    /// The data directory.
    pub data_dir: PathBuf,
    /// The owner of the data.
    pub identity: Identity,
    /// The protocol of the data.
    pub protocol: &'static str,
    /// The expected contents of the directory.
    pub expected: Expected,
    /// The placement of partitions, and whether the data itself knows the members of partitions.
    pub placement: (Placement, bool),
    /// If false, data survives the death of the process, but not of the machine.
    pub sync: bool,
    /// See [`Options::segment_bytes`].
    pub segment_bytes: u64,
    /// Whether to read and check every page of the state engine first.
    pub verify: bool,
    /// See [`Hook`].
    pub hook: Option<Hook>,
}

/// The recovered contents of a node's storage.
pub struct Recovered {
    /// The server machine's records.
    pub server: Vec<Bytes>,
    /// The gateway machine's records.
    pub gateway: Vec<Bytes>,
    /// The state engine.
    pub engine: Engine,
    /// The numbers that must never decrease. The incarnation is already that of this start.
    pub values: Values,
    /// A description of what was cut off at the end of the log.
    pub torn: Option<String>,
    /// The servers with which the data of partitions began that are placed on others now.
    pub founders: Founders,
    /// The directory was made because the node had lost its data.
    pub is_replacement: bool,
}

/// A node's storage, open and not yet running.
#[derive(Debug)]
pub struct Storage {
    directory: Directory,
    log: Log,
    ceilings: Ceilings,
    engine: Engine,
    /// The gateway's records since its last checkpoint, which a checkpoint of the server must
    /// preserve. They are few: a gateway only stores what its clients could not repeat.
    gateway: Vec<Bytes>,
}

/// The least number of the next client of a node that starts. An earlier life may have been lost, or
/// an older copy of its data may have been restored. Its clients' transactions are remembered
/// elsewhere, so no number may be given again. Numbers begin with the seconds since the epoch, 256
/// for each, so lives differ if each lasts a second for every 256 clients.
pub(crate) fn first_client() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs() << 8) & ((1 << ClientId::NUMBER_BITS) - 1)
}

/// The first number of a process that gives its first number, not below `least`. Two processes on
/// copies of one data directory have the same least number and may start in the same second, and other
/// nodes cannot tell their clients apart. So each skips some, drawn at random.
pub(crate) fn draw_client(least: u64) -> u64 {
    let is_ahead = least > first_client().saturating_add(AHEAD_MAX);
    let max = if is_ahead { SKIPPED_MAX_AHEAD } else { SKIPPED_MAX };
    // The standard library seeds each hasher at random.
    least + RandomState::new().build_hasher().finish() % max
}

impl Storage {
    /// Locks a data directory and reads its contents; makes one if it does not exist. Counts this
    /// start, durably.
    ///
    /// # Errors
    /// See [`StorageError`].
    pub fn open(settings: Settings) -> Result<(Self, Recovered), StorageError> {
        let Settings { data_dir, identity, protocol, expected, .. } = settings;
        let Settings { sync, segment_bytes, verify, hook, placement, .. } = settings;
        let mut directory = Directory::open(&data_dir, &identity, protocol, expected)?;
        let (placement, may_move) = placement;
        let (dir, state, file) = (directory.log(), directory.state(), directory.ceilings());
        let mut options = Options { sync, segment_bytes, durable: Position::default(), hook };
        let (log, records, engine, mut ceilings, torn);
        let mut founders = Founders::new();
        if directory.is_new() {
            placement.write_new(directory.path())?;
            log = Log::create(&dir, &identity, options)?;
            engine = Engine::create(&state, &identity)?;
            ceilings = Ceilings::create(&file, &identity, sync)?;
            ceilings.write(Values { clients: first_client(), ..ceilings.values() })?;
            directory.finish()?;
            (records, torn) = (Vec::new(), None);
        } else {
            let is_needed = directory.has_placement();
            founders = placement.check(directory.path(), may_move, is_needed)?;
            if !is_needed {
                // Of an earlier version, and it has a copy now.
                directory.finish()?;
            }
            ceilings = Ceilings::open(&file, &identity, sync)?;
            options.durable = ceilings.values().durable;
            let at;
            (engine, at) = Engine::open(&state, &identity, verify)?;
            let found;
            (log, found) = Log::open(&dir, &identity, options)?;
            if at < found.checkpoint {
                let log = found.checkpoint;
                return Err(StorageError::EngineBehind { path: state, engine: at, log });
            }
            torn = found.torn.map(|(path, offset, why)| {
                format!("{}: cut off at offset {offset}: {why}", path.display())
            });
            records = found.records;
        }
        let values = ceilings.values();
        let incarnation = values.incarnation + 1;
        // The directory may be an older copy, without the numbers that were given since.
        let clients = values.clients.max(first_client());
        ceilings.write(Values { incarnation, clients, ..values })?;
        let (server, gateway) = split(&identity, records)?;
        let values = ceilings.values();
        let is_replacement = directory.is_replacement();
        let storage =
            Self { directory, log, ceilings, engine: engine.clone(), gateway: gateway.clone() };
        let recovered =
            Recovered { server, gateway, engine, values, torn, founders, is_replacement };
        Ok((storage, recovered))
    }

    /// Starts the thread that writes. `report` is called on it.
    ///
    /// # Errors
    /// The operating system has no more threads.
    pub fn start(self, report: impl Fn(Report) + Send + 'static) -> std::io::Result<Writer> {
        let inbox: Arc<Inbox<Work>> = Arc::default();
        let is_killed = Arc::new(AtomicBool::new(false));
        let state = Thread {
            storage: self,
            inbox: inbox.clone(),
            is_killed: is_killed.clone(),
            report: Box::new(report),
            pending: None,
            appended: OrdMap::new(),
            has_reserved: false,
        };
        let thread =
            std::thread::Builder::new().name("storage".into()).spawn(move || state.run())?;
        Ok(Writer { inbox, is_killed, thread: Some(thread) })
    }
}

/// Sorts records by owner.
fn split(me: &Identity, records: Vec<Record>) -> Result<(Vec<Bytes>, Vec<Bytes>), StorageError> {
    let (mut server, mut gateway) = (Vec::new(), Vec::new());
    for Record { tag, bytes } in records {
        let bad = |why: &str| StorageError::Record { node: me.node, why: why.into() };
        match tag {
            SERVER => server.push(bytes),
            GATEWAY => gateway.push(bytes),
            GATEWAY_CHECKPOINT => {
                gateway =
                    unpack(bytes).ok_or_else(|| bad("a checkpoint of the gateway is cut off"))?;
            }
            other => return Err(bad(&format!("unknown owner {other}"))),
        }
    }
    Ok((server, gateway))
}

fn pack(records: &[Bytes]) -> Bytes {
    let mut out = BytesMut::new();
    for record in records {
        out.put_u32_le(record.len() as u32);
        out.put_slice(record);
    }
    out.freeze()
}

fn unpack(mut bytes: Bytes) -> Option<Vec<Bytes>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        if bytes.len() < 4 {
            return None;
        }
        let length = bytes.get_u32_le() as usize;
        if length > bytes.len() {
            return None;
        }
        records.push(bytes.split_to(length));
    }
    Some(records)
}

/// A task for the thread; tasks are executed in order.
#[derive(Debug)]
pub enum Work {
    /// Make a record durable.
    Persist {
        /// The owner.
        tag: Tag,
        /// Reported when it is durable.
        ticket: Ticket,
        /// Its bytes.
        record: Bytes,
    },
    /// Make versions durable in the state engine, then replace every earlier record of `tag`.
    Checkpoint {
        /// The owner.
        tag: Tag,
        /// Reported when it is done.
        ticket: Ticket,
        /// Versions to merge; empty for a gateway.
        versions: Arc<Memtable>,
        /// The records that replace all earlier ones.
        records: Vec<Bytes>,
    },
    /// Reserve client ids; answered with the first number and the one after the last.
    Clients(oneshot::Sender<(u64, u64)>),
    /// Store this reading of the node's clock.
    Clock(Timestamp),
    /// A merge that this thread started has ended.
    Merged(Result<(), StorageError>),
    /// Make everything before this durable, and end.
    Stop,
}

/// What the thread reports.
#[derive(Debug)]
pub enum Report {
    /// All records of this owner up to and including this ticket are durable.
    Durable(Tag, Ticket),
    /// The thread has ended because of this error; nothing more becomes durable.
    Failed(StorageError),
}

/// A handle on the running thread. Dropping it kills the thread.
#[derive(Debug)]
pub struct Writer {
    inbox: Arc<Inbox<Work>>,
    is_killed: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Queues work. After a failure it is dropped, because the node is stopping.
    pub fn submit(&self, work: Work) {
        self.inbox.push(work);
    }

    /// Amount of queued work.
    #[must_use]
    pub fn backlog(&self) -> usize {
        self.inbox.len()
    }

    /// A handle that queues work without keeping the thread alive.
    pub(crate) fn inbox(&self) -> Arc<Inbox<Work>> {
        self.inbox.clone()
    }

    /// Makes all queued records durable, ends the thread and unlocks the data directory.
    pub fn stop(mut self) {
        self.inbox.push(Work::Stop);
        self.join();
    }

    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported by the panic hook.
            let _ = thread.join();
        }
    }
}

impl Drop for Writer {
    /// Ends the thread without writing queued records, as a crash of the process would.
    fn drop(&mut self) {
        self.is_killed.store(true, Ordering::Relaxed);
        self.inbox.close();
        self.join();
    }
}

/// A checkpoint in progress.
struct Pending {
    ticket: Ticket,
    number: u64,
    /// Number of the first batch after the checkpoint.
    first: u64,
    records: Vec<Record>,
    merge: JoinHandle<()>,
}

/// Calls `run` on the thread with this name. A panic becomes an error, which stops the node: if the
/// thread ended without a word, nothing would become durable any more, and nobody would know.
pub(super) fn guard<T>(
    thread: &'static str,
    run: impl FnOnce() -> Result<T, StorageError>,
) -> Result<T, StorageError> {
    // What `run` has half changed is not used any more.
    std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(StorageError::Panic { thread, why: text.unwrap_or("no message").into() })
    })
}

struct Thread {
    storage: Storage,
    inbox: Arc<Inbox<Work>>,
    is_killed: Arc<AtomicBool>,
    report: Box<dyn Fn(Report) + Send>,
    pending: Option<Pending>,
    /// Each owner's last ticket in the log that has not been reported.
    appended: OrdMap<Tag, Ticket>,
    /// It has reserved client ids since it started. Starts without clients skip none.
    has_reserved: bool,
}

impl Thread {
    fn run(mut self) {
        let mut work = Vec::new();
        while self.inbox.drain(&mut work, usize::MAX, None) {
            match guard("storage", || self.carry_out(&mut work)) {
                Ok(true) => {}
                Ok(false) => break,
                Err(error) => {
                    self.inbox.close();
                    (self.report)(Report::Failed(error));
                    break;
                }
            }
        }
        self.inbox.close();
        // The merge writes to the data directory, so the lock is held until it has ended.
        if let Some(pending) = self.pending.take() {
            let _ = pending.merge.join();
        }
    }

    /// Executes work; returns false if the thread must end.
    fn carry_out(&mut self, work: &mut Vec<Work>) -> Result<bool, StorageError> {
        let mut stop = false;
        for item in work.drain(..) {
            if self.is_killed.load(Ordering::Relaxed) {
                return Ok(false);
            }
            match item {
                Work::Persist { tag, ticket, record } => self.persist(tag, ticket, record)?,
                Work::Checkpoint { tag: Tag::Server, ticket, versions, records } => {
                    self.begin_checkpoint(ticket, versions, records)?;
                }
                Work::Checkpoint { tag: Tag::Gateway, ticket, versions: _, records } => {
                    self.storage.log.add(GATEWAY_CHECKPOINT, &pack(&records))?;
                    self.storage.gateway = records;
                    self.appended.insert(Tag::Gateway, ticket);
                }
                Work::Clients(reply) => self.reserve_clients(reply)?,
                Work::Clock(reading) => self.write_clock(reading)?,
                Work::Merged(result) => {
                    result?;
                    self.end_checkpoint()?;
                }
                Work::Stop => stop = true,
            }
        }
        self.commit()?;
        if stop {
            let reading = self.storage.ceilings.values().clock;
            self.write_clock(reading)?;
        }
        Ok(!stop)
    }

    fn persist(&mut self, tag: Tag, ticket: Ticket, record: Bytes) -> Result<(), StorageError> {
        let owner = match tag {
            Tag::Server => SERVER,
            Tag::Gateway => GATEWAY,
        };
        self.storage.log.add(owner, &record)?;
        if tag == Tag::Gateway {
            self.storage.gateway.push(record);
        }
        self.appended.insert(tag, ticket);
        if self.storage.log.is_full() { self.commit() } else { Ok(()) }
    }

    fn commit(&mut self) -> Result<(), StorageError> {
        self.storage.log.commit()?;
        self.report_durable();
        Ok(())
    }

    fn report_durable(&mut self) {
        for tag in [Tag::Server, Tag::Gateway] {
            // A ticket implies that all earlier ones are durable, so no ticket is reported before
            // an unfinished checkpoint.
            if tag == Tag::Server && self.pending.is_some() {
                continue;
            }
            if let Some(ticket) = self.appended.remove(&tag) {
                (self.report)(Report::Durable(tag, ticket));
            }
        }
    }

    fn begin_checkpoint(
        &mut self,
        ticket: Ticket,
        versions: Arc<Memtable>,
        records: Vec<Bytes>,
    ) -> Result<(), StorageError> {
        assert!(self.pending.is_none(), "a second checkpoint began before the first was durable");
        self.commit()?;
        let number = self.storage.log.rotate()?;
        let first = self.storage.log.sequence();
        let server = records.into_iter().map(|bytes| Record { tag: SERVER, bytes });
        let gateway = self.storage.gateway.iter().cloned();
        let gateway = gateway.map(|bytes| Record { tag: GATEWAY, bytes });
        let records = server.chain(gateway).collect();
        // The merge may take long; the log continues in the meantime.
        let (engine, inbox) = (self.storage.engine.clone(), self.inbox.clone());
        let merge = std::thread::Builder::new()
            .name("checkpoint".into())
            .spawn(move || {
                let result = guard("checkpoint", || engine.merge(&versions, number));
                inbox.push(Work::Merged(result));
            })
            .map_err(|e| {
                StorageError::io("start a thread for", &self.storage.directory.state(), e)
            })?;
        self.pending = Some(Pending { ticket, number, first, records, merge });
        Ok(())
    }

    fn end_checkpoint(&mut self) -> Result<(), StorageError> {
        let Some(pending) = self.pending.take() else { return Ok(()) };
        let Pending { ticket, number, first, records, merge } = pending;
        let _ = merge.join();
        self.storage.log.checkpoint(number, first, &records)?;
        // Records appended in the meantime have later tickets; the next commit covers both.
        let last = self.appended.entry(Tag::Server).or_insert(ticket);
        *last = ticket.max(*last);
        Ok(())
    }

    fn reserve_clients(&mut self, reply: oneshot::Sender<(u64, u64)>) -> Result<(), StorageError> {
        let values = self.storage.ceilings.values();
        let first = match self.has_reserved {
            true => values.clients,
            false => draw_client(values.clients),
        };
        self.has_reserved = true;
        let end = first + CLIENTS;
        self.storage.ceilings.write(Values { clients: end, ..values })?;
        // If the caller is gone, its ids stay unused.
        let _ = reply.send((first, end));
        Ok(())
    }

    fn write_clock(&mut self, reading: Timestamp) -> Result<(), StorageError> {
        self.commit()?;
        let values = self.storage.ceilings.values();
        let clock = values.clock.max(reading);
        let log = &self.storage.log;
        let durable = if log.is_synced() { log.end() } else { values.durable };
        self.storage.ceilings.write(Values { clock, durable, ..values })
    }
}
