//! Applies faults to the nodes and links of a simulation when they begin, and heals them when they
//! end.

use orthodrome_core::id::NodeId;
use orthodrome_core::machine::{Input, Machine as _, Protocol, Refusal};
use orthodrome_core::time::Duration;
use orthodrome_core::trace::Event as TraceEvent;

use super::Action;
use crate::simulation::{Process, Simulation};

impl<P: Protocol> Simulation<P> {
    /// An entry of the schedule begins or ends.
    pub(crate) fn fault(&mut self, entry: u32, is_heal: bool) {
        let Some(planned) = self.plan.entries.get(entry as usize) else { return };
        let (name, action) = (planned.name, planned.action.clone());
        // An entry of the schedule belongs to no node. It is logged at `n0`, which no cluster has.
        self.env.log(u32::MAX, TraceEvent::Fault, None, None, None, name, || {
            let what = if is_heal { "ends" } else { "begins" };
            format!("{what} {action:?}")
        });
        if is_heal {
            self.end_fault(&action);
        } else {
            if self.takes(&action) {
                *self.injected.entry(name).or_default() += 1;
            }
            self.begin_fault(&action);
        }
    }

    /// False for an order to a protocol that takes none: nothing happens then.
    fn takes(&self, action: &Action) -> bool {
        let Action::Admin { order, .. } = action else { return true };
        let mut servers = self.nodes.iter().filter_map(|node| match &node.process {
            Process::Server(host) => Some(host.machine()),
            Process::Gateway(_) | Process::Down => None,
        });
        !servers.any(|server| matches!(server.refusal(order), Some(Refusal::Never(_))))
    }

    fn begin_fault(&mut self, action: &Action) {
        let now = self.env.now;
        match action {
            Action::Crash { nodes, torn } => {
                for &index in nodes {
                    self.node(index).held_down += 1;
                    self.crash(index, *torn);
                }
            }
            Action::Replace(nodes) => {
                for &index in nodes {
                    self.node(index).held_down += 1;
                    self.crash(index, false);
                    self.return_disk(index);
                    self.node(index).disk.replace();
                }
            }
            Action::Disk { nodes, failure } => {
                nodes.iter().for_each(|&n| self.node(n).disk.failure = Some(*failure));
            }
            Action::Pause(nodes) => nodes.iter().for_each(|&n| self.node(n).paused += 1),
            Action::Links { pairs, by } => {
                pairs.iter().for_each(|&(from, to)| self.env.network.disturb(from, to, *by));
            }
            Action::SlowCpu { nodes, factor } => {
                nodes.iter().for_each(|&n| self.node(n).cpu.slow_down(*factor));
            }
            Action::Clock { nodes, step_ns, ppm } => {
                for &index in nodes {
                    let clock = &mut self.node(index).clock;
                    clock.step(*step_ns);
                    clock.drift(*ppm, now);
                }
            }
            Action::SlowDisk { nodes, extra } => {
                nodes.iter().for_each(|&n| self.node(n).disk.slow_down(*extra));
            }
            Action::FlipBit(nodes) => nodes.iter().for_each(|&n| self.flip_bit(n)),
            Action::SwapDisks(a, b) => self.swap_disks(*a, *b),
            Action::LyingFsync(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.lie(true)),
            Action::OldCopy(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.copy()),
            Action::Admin { nodes, order } => {
                for &index in nodes {
                    self.input(index, Input::Admin(order.clone()), 0);
                }
            }
        }
    }

    fn end_fault(&mut self, action: &Action) {
        let now = self.env.now;
        match action {
            Action::Crash { nodes, .. } | Action::Replace(nodes) => {
                for &index in nodes {
                    let node = self.node(index);
                    node.held_down = node.held_down.saturating_sub(1);
                    self.start_node(index);
                }
            }
            Action::Disk { nodes, .. } => nodes.iter().for_each(|&n| self.repair_disk(n)),
            Action::Pause(nodes) => {
                for &index in nodes {
                    let node = self.node(index);
                    node.paused = node.paused.saturating_sub(1);
                    self.resume(index);
                }
            }
            Action::Links { pairs, by } => {
                for &(from, to) in pairs {
                    let released = self.env.network.calm(now, from, to, *by);
                    self.release(released);
                }
            }
            Action::SlowCpu { nodes, .. } => {
                nodes.iter().for_each(|&n| self.speed_up(n));
            }
            Action::Clock { nodes, .. } => nodes.iter().for_each(|&n| self.node(n).clock.repair()),
            Action::SlowDisk { nodes, .. } => {
                nodes.iter().for_each(|&n| self.node(n).disk.slow_down(Duration::ZERO));
            }
            Action::FlipBit(nodes) => {
                for &index in nodes {
                    self.node(index).disk.restore();
                    self.start_node(index);
                }
            }
            Action::SwapDisks(a, b) => {
                for index in [*a, *b] {
                    self.return_disk(index);
                    self.start_node(index);
                }
            }
            Action::LyingFsync(nodes) => nodes.iter().for_each(|&n| self.node(n).disk.lie(false)),
            Action::OldCopy(nodes) => nodes.iter().for_each(|&n| self.roll_back(n)),
            // An order is given only once.
            Action::Admin { .. } => {}
        }
    }

    /// A node loses power, a bit of its log flips, and it tries to start.
    fn flip_bit(&mut self, index: u32) {
        self.crash(index, false);
        let Self { nodes, env, .. } = self;
        let Some(node) = nodes.get_mut(index as usize) else { return };
        let lost = node.disk.flip_bit(env.now, &mut env.disk_rng);
        self.lose_writes(index, lost, "by a flipped bit at the end of its log");
        self.start_node(index);
    }

    /// Two nodes lose power, and each tries to start with the other's disk.
    fn swap_disks(&mut self, a: u32, b: u32) {
        for index in [a, b] {
            self.crash(index, false);
            self.return_disk(index);
        }
        self.exchange_disks(a, b);
        self.start_node(a);
        self.start_node(b);
    }

    fn exchange_disks(&mut self, a: u32, b: u32) {
        if let Ok([a, b]) = self.nodes.get_disjoint_mut([a as usize, b as usize]) {
            std::mem::swap(&mut a.disk, &mut b.disk);
        }
    }

    /// Gives a node that is down its own disk back, if another node has it.
    fn return_disk(&mut self, index: u32) {
        let id = self.node(index).id;
        let holder = (0_u32..).zip(&self.nodes).find(|(_, node)| node.disk.owner() == id);
        if let Some((holder, _)) = holder.filter(|(holder, _)| *holder != index) {
            self.exchange_disks(index, holder);
        }
    }

    /// Puts a copy of a node's disk in place of the disk.
    fn roll_back(&mut self, index: u32) {
        self.crash(index, false);
        let lost = self.node(index).disk.roll_back();
        self.lose_writes(index, lost, "by an old copy of its disk");
        self.start_node(index);
    }

    fn repair_disk(&mut self, index: u32) {
        let node = self.node(index);
        node.disk.failure = None;
        if std::mem::take(&mut node.disk_stopped) {
            node.held_down = node.held_down.saturating_sub(1);
            self.start_node(index);
        }
    }

    /// Ends every fault and cancels later ones. The nodes in `down` stay down for ever. This begins
    /// a liveness phase.
    pub fn heal_all(&mut self, down: &[NodeId]) {
        let now = self.env.now;
        self.plan.entries.clear();
        let count = u32::try_from(self.nodes.len()).unwrap_or(u32::MAX);
        for from in 0..count {
            for to in 0..count {
                let released = self.env.network.calm_all(now, from, to);
                self.release(released);
            }
        }
        (0..count).for_each(|index| self.return_disk(index));
        for index in 0..count {
            self.speed_up(index);
            let node = self.node(index);
            let stays_down = down.contains(&node.id);
            node.held_down = u32::from(stays_down);
            node.disk_stopped = false;
            node.disk.failure = None;
            node.disk.slow_down(Duration::ZERO);
            node.disk.restore();
            node.disk.lie(false);
            node.clock.repair();
            node.paused = 0;
            if stays_down {
                self.crash(index, false);
            } else {
                self.start_node(index);
                self.resume(index);
            }
        }
    }
}
