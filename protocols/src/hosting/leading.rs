//! `Leading` is a partition together with its leader's state. Handlers that only a leader may run
//! are its methods (ADR 34).

use std::collections::VecDeque;

use orthodrome_core::id::PartitionId;

use super::{CommandOf, Partition, Role, World};
use crate::replication::Replica;

/// The context of a leader's handler. It exists only while the replica leads.
pub struct Leading<'p, R: Role> {
    /// The partition.
    pub id: PartitionId,
    /// Its replicated state.
    pub state: &'p R::State,
    /// The leader's own state.
    pub leader: &'p mut R,
    /// The replica's state that is not in the log.
    pub own: &'p mut R::Own,
    /// The replica of the log.
    pub replica: &'p mut Replica<R::Log>,
    backlog: &'p mut VecDeque<CommandOf<R>>,
}

impl<R: Role> Partition<R> {
    /// This replica as leader, if it leads and has applied everything that earlier leaders left.
    pub fn leading(&mut self) -> Option<Leading<'_, R>> {
        let Self { id, state, leader, own, replica, backlog, .. } = self;
        leader.as_mut().map(|leader| Leading { id: *id, state, leader, own, replica, backlog })
    }

    /// The same for code that only a leader can reach: requests, and timers of a leader.
    pub fn led(&mut self) -> Leading<'_, R> {
        let id = self.id;
        let Some(leading) = self.leading() else { unreachable!("{id} serves without leading") };
        leading
    }
}

impl<R: Role> Leading<'_, R> {
    /// Proposes a command. While the log accepts none, because leadership is being transferred or
    /// too many entries wait to be chosen, commands queue in order: a leader that stays must
    /// propose everything that it has acted on. A leader that is deposed loses the queue, as in a
    /// crash.
    pub fn propose(&mut self, command: CommandOf<R>, world: &mut World<'_, R>) {
        self.backlog.push_back(command);
        propose_backlog(self.id, self.replica, self.backlog, world);
        world.touch(self.id);
    }

    /// True if a command proposed now is appended to the log at once.
    pub fn log_takes_commands(&self) -> bool {
        self.backlog.is_empty() && self.replica.takes_commands()
    }

    /// Asks the group whether this replica still leads. [`Role::on_read_index`] receives the
    /// answer.
    pub fn read_index(&mut self, id: u64, world: &mut World<'_, R>) {
        self.replica.read_index(id, &mut world.io(self.id));
        world.touch(self.id);
    }
}

/// Appends queued commands to the log while it accepts them.
pub(super) fn propose_backlog<R: Role>(
    id: PartitionId,
    replica: &mut Replica<R::Log>,
    backlog: &mut VecDeque<CommandOf<R>>,
    world: &mut World<'_, R>,
) {
    while replica.takes_commands()
        && let Some(command) = backlog.pop_front()
    {
        replica.propose(command, &mut world.io(id));
    }
}
