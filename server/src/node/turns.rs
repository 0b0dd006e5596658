//! On which thread a machine takes its turn: on any that has something for it.
//!
//! A thread that has put something into an inbox runs the machine itself, if no other thread does at
//! that moment; and if one does, that one finds it before it goes. So a message needs no hand-over
//! from the thread that read it from its socket to a thread of the machine, nor a record that became
//! durable. What arrives by one look of the runtime at its sockets is one batch: its task runs the
//! machines after the tasks that were ready. A machine's own thread fires its timers, and takes over
//! when there is more to do than a guest should.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

use super::driver::Turn;
use super::{Guard, Shared, Tag};
use crate::wire::WireProtocol;

/// Turns that a thread takes in a row which has other work too.
const GUEST_TURNS: usize = 4;

const MACHINES: [(Tag, &str); 2] = [(Tag::Gateway, "gateway"), (Tag::Server, "server")];

/// Drops the machine when its thread ends, in whatever way: callers that wait learn of it.
struct Life<'a>(&'a Mutex<Option<Box<dyn Turn>>>);

impl Drop for Life<'_> {
    fn drop(&mut self) {
        // After a turn under way, which may have panicked; nothing more is done with the machine.
        let machine = self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(machine);
    }
}

type Slot<'a> = MutexGuard<'a, Option<Box<dyn Turn>>>;

impl<P: WireProtocol> Shared<P> {
    /// Lets whatever waits for the machines be taken soon, together with what else is ready: for
    /// tasks of the runtime.
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
            // Tasks that are ready, and sockets that are, come first.
            tokio::task::yield_now().await;
            self.run();
        }
    }

    /// Runs the machines on this thread, as far as others do not, until nothing waits, or for as long
    /// as a guest may; then writes what they have sent and wakes the disk's thread for what they have
    /// persisted.
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
                    // Who has it looks again before it goes.
                    Err(TryLockError::WouldBlock) => {}
                    // Its panic has ended the node.
                    Err(TryLockError::Poisoned(_)) => {}
                }
            }
            if is_idle {
                return;
            }
        }
        self.leave_to_owners();
    }

    /// What waits is for the machines' own threads.
    pub(super) fn leave_to_owners(&self) {
        for (tag, _) in MACHINES {
            if self.inbox(tag).len() > 0 {
                self.inbox(tag).wake();
            }
        }
    }

    /// The life of a machine's own thread, from when the machine has started; drops the machine when
    /// the inbox is closed and empty, or the node has ended.
    pub(super) fn own(&self, tag: Tag, machine: Box<dyn Turn>) {
        let name = match tag {
            Tag::Server => "server",
            Tag::Gateway => "gateway",
        };
        let slot = self.machine(tag);
        *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(machine);
        let _life = Life(slot);
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

    /// A node that was killed or has failed does nothing with what still waits.
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
