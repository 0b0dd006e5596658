//! Chooses the thread on which a machine takes its turn: any thread that has an input for it.
//!
//! A thread that has put an event into an inbox runs the machine itself, unless another thread is
//! running it; that thread will find the event before it stops. So neither a message nor a durable
//! record must be handed over to another thread. All messages that arrive in one poll of the
//! runtime are one batch: a task of the runtime runs the machines after all tasks that were ready.
//! A machine's own thread fires its timers, and takes over when there is more work than a guest
//! thread should do.

use std::sync::{Arc, MutexGuard, PoisonError, TryLockError};

use super::Shared;
use super::driver::Turn;
use super::start::Guard;
use crate::storage::Tag;
use crate::wire::WireProtocol;

/// Maximum number of consecutive turns on a thread that also has other work.
const GUEST_TURNS: usize = 4;

const MACHINES: [(Tag, &str); 2] = [(Tag::Gateway, "gateway"), (Tag::Server, "server")];

/// The life of a machine's thread. When it ends, in whatever way, the machine is dropped, and so is
/// what still waits for it: callers learn from that that they get no answer.
pub(super) struct Life<'a, P: WireProtocol> {
    pub(super) shared: &'a Shared<P>,
    pub(super) tag: Tag,
}

impl<P: WireProtocol> Drop for Life<'_, P> {
    fn drop(&mut self) {
        // After a turn under way, which may have panicked; nothing more is done with the machine.
        let slot = self.shared.machine(self.tag);
        let machine = slot.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(machine);
        let inbox = self.shared.inbox(self.tag);
        inbox.close();
        let mut rest = Vec::new();
        inbox.take(&mut rest, usize::MAX);
    }
}

type Slot<'a> = MutexGuard<'a, Option<Box<dyn Turn>>>;

impl<P: WireProtocol> Shared<P> {
    /// Schedules a run of the machines soon, together with other ready events: for tasks of the
    /// runtime.
    pub(super) fn tick(&self) {
        self.ticks.notify_one();
    }

    /// Runs the machines when asked to by [`Shared::tick`], until the node ends.
    pub(super) async fn run_on_ticks(self: Arc<Self>) {
        loop {
            self.ticks.notified().await;
            if self.ended.is_cancelled() {
                return;
            }
            // Ready tasks and sockets come first.
            tokio::task::yield_now().await;
            self.run();
        }
    }

    /// Runs the machines on this thread, as far as others do not, until nothing waits, or for as long
    /// as a guest may.
    pub(super) fn run(&self) {
        for _ in 0..GUEST_TURNS {
            let mut is_idle = true;
            for (tag, name) in MACHINES {
                if self.inbox(tag).len() == 0 {
                    continue;
                }
                match self.machine(tag).try_lock() {
                    Ok(slot) => {
                        self.turn(slot, name);
                        is_idle = false;
                    }
                    // The thread that runs it looks again before it stops.
                    Err(TryLockError::WouldBlock) => {}
                    // The machine's panic has ended the node.
                    Err(TryLockError::Poisoned(_)) => {}
                }
            }
            if is_idle {
                return;
            }
        }
        self.leave_to_owners();
    }

    /// Leaves the queued work to the machines' own threads.
    pub(super) fn leave_to_owners(&self) {
        for (tag, _) in MACHINES {
            if self.inbox(tag).len() > 0 {
                self.inbox(tag).wake();
            }
        }
    }

    /// What a machine's own thread does once the machine has started, until the inbox is closed and
    /// empty, or the node has ended. [`Life`] drops the machine.
    pub(super) fn own(&self, tag: Tag, machine: Box<dyn Turn>) {
        let name = match tag {
            Tag::Server => "server",
            Tag::Gateway => "gateway",
        };
        let slot = self.machine(tag);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(machine);
        // What came before there was a machine.
        self.inbox(tag).wake();
        loop {
            let is_open = self.inbox(tag).rest();
            if self.ended.is_cancelled() {
                break;
            }
            if let Ok(slot) = slot.lock() {
                self.turn(slot, name);
            }
            self.run();
            if !is_open && self.inbox(tag).len() == 0 {
                break;
            }
        }
    }

    /// Takes a turn. A killed or failed node ignores what is still queued.
    fn turn(&self, mut slot: Slot<'_>, name: &'static str) {
        let Some(machine) = slot.as_mut().filter(|_| !self.ended.is_cancelled()) else { return };
        let guard = Guard { shared: self, name };
        let turned = machine.turn();
        drop(guard);
        drop(slot);
        if let Err(error) = turned {
            self.fail(&error.to_string());
        }
    }
}
