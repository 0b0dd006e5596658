//! Chooses the thread on which a machine takes its turn: any thread that has an input for it.
//!
//! A thread that has put an event into an inbox runs the machine itself, unless another thread is
//! running it; that thread will find the event before it stops. So neither a message nor a durable
//! record must be handed over to another thread. All messages that arrive in one poll of the
//! runtime are one batch: a task of the runtime runs the machines after all tasks that were ready.
//! A machine's own thread fires its timers, and takes over when there is more work than a guest
//! thread should do.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::driver::Turn;
use super::{Guard, Shared, Tag};
use crate::wire::WireProtocol;

/// Maximum number of consecutive turns on a thread that also has other work.
const GUEST_TURNS: usize = 4;

const MACHINES: [(Tag, &str); 2] = [(Tag::Gateway, "gateway"), (Tag::Server, "server")];

/// Drops the machine when its thread ends, in any way: waiting callers are informed.
struct Life<'a>(&'a Mutex<Option<Box<dyn Turn>>>);

impl Drop for Life<'_> {
    fn drop(&mut self) {
        // Waits for a running turn, which may panic; the machine is not used any more.
        let machine = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(machine);
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

    /// Runs the machines on this thread, unless other threads do, until there is no work, or as
    /// long as a guest thread may. Then writes their messages, and wakes the storage thread for
    /// their records.
    pub(super) fn run(&self) {
        self.take_turns();
        self.flush();
    }

    fn take_turns(&self) {
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

    /// The loop of a machine's own thread, from the machine's start. Drops the machine when the
    /// inbox is closed and empty, or the node has ended.
    pub(super) fn own(&self, tag: Tag, machine: Box<dyn Turn>) {
        let name = match tag {
            Tag::Server => "server",
            Tag::Gateway => "gateway",
        };
        let slot = self.machine(tag);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(machine);
        let _life = Life(slot);
        // For events that arrived before the machine.
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
