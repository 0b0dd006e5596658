//! Names for scans ([`orthodrome_core::scan`]): requests to the servers of the cluster, and answers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use orthodrome_core::NodeId;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::scan::{Answer, Ask, Listing};
use orthodrome_core::wire::{self, Wire};
use tokio::sync::mpsc;

use super::driver::Event;
use super::{BACKLOG_MAX, Shared};
use crate::scan::Answers;
use crate::storage::Tag;
use crate::wire::WireProtocol;

/// The number of answers that may wait for one scan. A scan asks again for what has no room.
const ANSWERS_MAX: usize = 1_024;

/// A request of a scan of another process.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
struct Asked {
    /// The number of the scan at that process.
    scan: u64,
    ask: Ask,
}

/// The answer.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
struct Answered {
    /// The number of the scan.
    scan: u64,
    answer: Answer,
}

/// A request for names that waits for the server machine.
#[derive(Debug)]
pub(super) struct Waiting {
    /// The process that asks.
    from: NodeId,
    scan: u64,
    pub(super) ask: Ask,
}

/// The scans of this process.
#[derive(Debug, Default)]
pub(super) struct Scans {
    last: AtomicU64,
    open: Mutex<OrdMap<u64, mpsc::Sender<(NodeId, Answer)>>>,
}

impl Scans {
    fn open(&self) -> MutexGuard<'_, OrdMap<u64, mpsc::Sender<(NodeId, Answer)>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens a scan: its number, and its answers.
    pub(super) fn begin(&self) -> (u64, Answers) {
        let scan = self.last.fetch_add(1, Ordering::Relaxed) + 1;
        let (sender, answers) = mpsc::channel(ANSWERS_MAX);
        self.open().insert(scan, sender);
        (scan, answers)
    }

    /// The scan has ended.
    pub(super) fn end(&self, scan: u64) {
        self.open().remove(&scan);
    }

    fn answer(&self, from: NodeId, scan: u64, answer: Answer) {
        if let Some(sender) = self.open().get(&scan) {
            // A scan that has ended, or has no room, does without.
            let _ = sender.try_send((from, answer));
        }
    }
}

impl<P: WireProtocol> Shared<P> {
    /// Asks a server for names.
    pub(super) fn ask(&self, scan: u64, to: NodeId, ask: Ask) {
        let me = self.me.node;
        if to == me {
            self.put(Tag::Server, Event::Names(Box::new(Waiting { from: me, scan, ask })));
        } else if let Some(transport) = self.transport.get() {
            transport.send_names(me, to, false, |out| Asked { scan, ask }.put(out));
        }
    }

    /// Passes on what the server machine has listed.
    pub(super) fn listed(&self, waiting: Waiting, listing: Option<Listing>) {
        let Waiting { from, scan, ask } = waiting;
        let answer = Answer { unit: ask.unit, round: ask.round, listing };
        let me = self.me.node;
        if from == me {
            self.scans.answer(me, scan, answer);
        } else if let Some(transport) = self.transport.get() {
            transport.send_names(me, from, true, |out| Answered { scan, answer }.put(out));
        }
    }

    /// Takes a request or an answer of another process.
    ///
    /// # Errors
    /// The bytes are neither, or for another machine.
    pub(super) async fn on_names(
        &self,
        from: NodeId,
        to: NodeId,
        is_answer: bool,
        bytes: Bytes,
    ) -> Result<(), String> {
        if to != self.me.node {
            return Err(format!("a request for names of {to}, which does not run in this process"));
        }
        if is_answer {
            let answered: Answered = wire::decode(&bytes).map_err(|error| error.to_string())?;
            self.scans.answer(from, answered.scan, answered.answer);
            return Ok(());
        }
        let Asked { scan, ask } = wire::decode(&bytes).map_err(|error| error.to_string())?;
        let waiting = Box::new(Waiting { from, scan, ask });
        self.server.put_when_room(Event::Names(waiting), BACKLOG_MAX).await;
        Ok(())
    }
}
