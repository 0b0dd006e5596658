//! `Leading` is a partition together with its leader; handlers that only a leader may run are its
//! methods (ADR 34).

use std::collections::VecDeque;

use orthodrome_core::id::PartitionId;

use super::{CommandOf, Partition, Role, World};
use crate::replication::Replica;

/// What a leader's handler works on. It exists only while the replica leads.
pub struct Leading<'p, R: Role> {
    /// Which partition.
    pub id: PartitionId,
    /// Its replicated state.
    pub state: &'p R::State,
    /// What only the leader knows.
    pub leader: &'p mut R,
    /// What the replica keeps beside the state.
    pub own: &'p mut R::Own,
    /// Its replica of the log.
    pub replica: &'p mut Replica<R::Log>,
    backlog: &'p mut VecDeque<CommandOf<R>>,
}

impl<R: Role> Partition<R> {
    /// This replica as a leader, if it is one and has applied all that earlier leaders left.
    pub fn leading(&mut self) -> Option<Leading<'_, R>> {
        let Self { id, state, leader, own, replica, backlog, .. } = self;
        leader.as_mut().map(|leader| Leading { id: *id, state, leader, own, replica, backlog })
    }

    /// The same where only a leader can be: what comes is a request, or a leader's timer.
    pub fn led(&mut self) -> Leading<'_, R> {
        let id = self.id;
        let Some(leading) = self.leading() else { unreachable!("{id} serves without leading") };
        leading
    }
}

impl<R: Role> Leading<'_, R> {
    /// Proposes a command. While the log takes none, because leadership is being handed over or too
    /// much waits to be chosen, commands queue up in order: a leader that stays has to propose what
    /// it acted on. One that is deposed loses them, like one that crashes.
    pub fn propose(&mut self, command: CommandOf<R>, world: &mut World<'_, R>) {
        self.backlog.push_back(command);
        propose_backlog(self.id, self.replica, self.backlog, world);
        world.touch(self.id);
    }

    /// True if a command proposed now goes into the log at once.
    pub fn log_takes_commands(&self) -> bool {
        self.backlog.is_empty() && self.replica.takes_commands()
    }

    /// Asks the group whether this replica still leads; [`Role::on_read_index`] has the answer.
    pub fn read_index(&mut self, id: u64, world: &mut World<'_, R>) {
        self.replica.read_index(id, &mut world.io(self.id));
        world.touch(self.id);
    }
}

/// Puts commands into the log as long as it takes some.
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
