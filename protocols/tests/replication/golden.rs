//! Scripts in `src/replication/testdata`: every message, event and state written back.
//! `UPDATE_GOLDENFILES=1 cargo test -p orthodrome-protocols --test replication golden` rewrites
//! them.

use std::collections::VecDeque;
use std::error::Error;
use std::fmt::Write as _;

use orthodrome_core::id::PartitionId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::{Duration, NodeId, Ticket, Time};
use orthodrome_protocols::replication::{
    Config, Entry, Group, Index, Members, Message, Mutations, Payload, Quorums, Record, Shared,
    Term, Timer,
};

use crate::node::{Node, Register, Told};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// A group whose every message waits for the script.
#[derive(Default)]
struct Script {
    now: Time,
    nodes: OrdMap<NodeId, Node>,
    net: VecDeque<(NodeId, NodeId, Message<Register>)>,
    cut: OrdSet<(NodeId, NodeId)>,
    /// Nodes whose disk waits for `sync`.
    slow: OrdSet<NodeId>,
    /// A deliberate bug, to see that a script would notice it.
    mutations: Mutations,
    out: String,
}

struct Args<'a>(goldenscript::ArgumentConsumer<'a>);

impl Args<'_> {
    fn node(&mut self) -> Result<NodeId> {
        Ok(self.0.next_pos().ok_or("a node is missing")?.parse()?)
    }

    fn nodes(&mut self) -> Result<Vec<NodeId>> {
        std::iter::from_fn(|| self.0.next_pos()).map(|text| Ok(text.parse()?)).collect()
    }

    fn key(&mut self, name: &str) -> Option<String> {
        self.0.take_key(name).map(Into::into)
    }

    fn number(&mut self, name: &str, default: u64) -> Result<u64> {
        Ok(self.key(name).map_or(Ok(default), |text| text.parse())?)
    }

    fn list(&mut self, name: &str) -> Result<Option<Vec<NodeId>>> {
        let Some(text) = self.key(name) else { return Ok(None) };
        let names = text.split_whitespace();
        Ok(Some(names.map(str::parse).collect::<std::result::Result<_, _>>()?))
    }
}

impl goldenscript::Runner for Script {
    type Command = goldenscript::Command;

    fn run(
        &mut self,
        command: &goldenscript::Command,
        _context: &goldenscript::Context,
    ) -> Result<String> {
        let mut args = Args(command.consume_args());
        match command.name.as_str() {
            "cluster" => self.cluster(&mut args)?,
            "load" => self.load(&mut args)?,
            "campaign" => self.campaign(args.node()?)?,
            "fire" => self.fire(&mut args)?,
            "wait" => {
                let millis: u64 = args.0.next_pos().ok_or("milliseconds")?.parse()?;
                self.now = self.now + Duration::from_millis(millis);
            }
            "propose" => self.propose(&mut args)?,
            "deliver" => self.deliver(&mut args)?,
            "drop" => self.drop(&mut args)?,
            "repeat" => self.repeat(&mut args)?,
            "cut" => self.cut(&mut args)?,
            "heal" => self.cut.clear(),
            "disk" => self.disk(&mut args)?,
            "sync" => {
                for id in args.nodes()? {
                    self.sync(id)?;
                }
            }
            "crash" => self.crash(&mut args)?,
            "restart" => {
                for id in args.nodes()? {
                    let now = self.now;
                    self.node(id)?.start(now);
                    self.collect(id)?;
                }
            }
            "read" => {
                let id = args.node()?;
                let reads: Vec<u64> = std::iter::from_fn(|| args.0.next_pos())
                    .map(str::parse)
                    .collect::<std::result::Result<_, _>>()?;
                let now = self.now;
                self.node(id)?.with(now, |replica, out| {
                    reads.into_iter().for_each(|read| replica.read_index(read, out));
                });
                self.collect(id)?;
            }
            "lease" => {
                let id = args.node()?;
                let now = self.now;
                let replica = self.node(id)?.replica.as_ref().ok_or("down")?;
                let has = if replica.has_lease(now) { "has a lease" } else { "has no lease" };
                writeln!(self.out, "{id} {has}")?;
            }
            "leader" => {
                let id = args.node()?;
                let leader = self.node(id)?.replica.as_ref().ok_or("down")?.leader();
                let named = leader.map_or("nobody".into(), |leader| leader.to_string());
                writeln!(self.out, "{id} names {named}")?;
            }
            "successor" => {
                let id = args.node()?;
                let now = self.now;
                let successor = self.node(id)?.replica.as_ref().ok_or("down")?.successor(now);
                let named = successor.map_or("nobody".into(), |node| node.to_string());
                writeln!(self.out, "{named} should lead after {id}")?;
            }
            "transfer" => {
                let (id, to) = (args.node()?, args.node()?);
                let now = self.now;
                self.node(id)?.with(now, |replica, out| replica.transfer(to, out));
                self.collect(id)?;
            }
            "change" => self.change(&mut args)?,
            "orders" => {
                let id = args.node()?;
                let replica = self.node(id)?.replica.as_ref().ok_or("down")?;
                for order in replica.orders(PartitionId(0)) {
                    let voters: Vec<_> = order.voters.iter().map(NodeId::to_string).collect();
                    let (state, detail) = (order.state.name(), order.state.detail());
                    writeln!(self.out, "{id} ordered {}: {state} {detail}", voters.join(" "))?;
                }
            }
            "compact" => {
                let id = args.node()?;
                let keep = usize::try_from(args.number("keep", 0)?)?;
                let node = self.node(id)?;
                node.keep = keep;
                node.compact();
                let base = node.replica.as_ref().ok_or("down")?.base_index();
                writeln!(self.out, "{id} log starts after {base}")?;
                self.collect(id)?;
            }
            "ask" => {
                // A candidate, right or wrong, asks for a vote.
                let (from, to) = (args.node()?, args.node()?);
                let term = Term(args.number("term", 1)?);
                let (last_index, last_term) = (Index(args.number("last", 0)?), term);
                let transfer = false;
                let ask = Message::RequestVote { term, last_index, last_term, transfer };
                self.net.push_back((from, to, ask));
            }
            "state" => self.state()?,
            "log" => self.log(&mut args)?,
            "queue" => {
                for (from, to, msg) in &self.net {
                    writeln!(self.out, "{from} to {to}: {msg}")?;
                }
            }
            name => return Err(format!("unknown command {name}").into()),
        }
        args.0.reject_next()?;
        Ok(std::mem::take(&mut self.out))
    }
}

impl Script {
    fn node(&mut self, id: NodeId) -> Result<&mut Node> {
        self.nodes.get_mut(&id).ok_or_else(|| format!("there is no {id}").into())
    }

    /// `cluster 3 [spare=1] [preferred=n1] [election=4 write=2] [window=1] [batch=100]`
    fn cluster(&mut self, args: &mut Args<'_>) -> Result<()> {
        let count: u32 = args.0.next_pos().ok_or("how many voters?")?.parse()?;
        let spare = u32::try_from(args.number("spare", 0)?)?;
        let voters: Vec<NodeId> = (1..=count).map(NodeId).collect();
        let preferred_leader = args.key("preferred").map(|text| text.parse()).transpose()?;
        let mut config = Config::with_election_timeout(Duration::from_millis(1_000));
        config.mutations = self.mutations;
        config.snapshot_window = usize::try_from(args.number("window", 1)?)?;
        config.max_batch_bytes = usize::try_from(args.number("batch", 10_000)?)?;
        config.max_inflight = usize::try_from(args.number("inflight", 64)?)?;
        if let Some(election) = args.key("election") {
            let write = usize::try_from(args.number("write", 0)?)?;
            config.quorums = Quorums::Flexible { election: election.parse()?, write };
        }
        let group = Group { voters, learners: Vec::new(), preferred_leader };
        config.check(&group)?;
        for id in (1..=count + spare).map(NodeId) {
            let is_voter = id.0 <= count;
            let group = if is_voter { group.clone() } else { Group::default() };
            self.nodes.insert(id, Node::new(id, group, config.clone(), 1));
            let now = self.now;
            self.node(id)?.start(now);
            self.collect(id)?;
        }
        Ok(())
    }

    /// `load n1 1 1 4 [term=5] [vote=n2] [incomplete=1]`: restarts a node with a log of entries of
    /// these terms.
    fn load(&mut self, args: &mut Args<'_>) -> Result<()> {
        let id = args.node()?;
        let (now, term) = (self.now, args.number("term", 0)?);
        let is_incomplete = args.number("incomplete", 0)? > 0;
        let vote = args.key("vote").map(|text| text.parse()).transpose()?;
        let terms: Vec<u64> = std::iter::from_fn(|| args.0.next_pos())
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()?;
        let term = Term(term.max(terms.last().copied().unwrap_or(0)));
        let node = self.node(id)?;
        node.crash(0);
        let members = Box::new(Members::settled(node.group.voters.clone(), Vec::new()));
        let mut records = vec![
            Record::Base { index: Index(0), term: Term(0), members },
            Record::HardState { term, vote },
        ];
        records.extend(is_incomplete.then_some(Record::Incomplete));
        for (index, term) in (1..).map(Index).zip(terms) {
            let payload = Payload::Command(Shared::new(100 * term + index.0));
            records.push(Record::Entry { index, entry: Entry { term: Term(term), payload } });
        }
        node.disk.durable.records = records;
        node.start(now);
        self.collect(id)
    }

    /// Time passes until the node's election timer has run out and nobody protects an old leader.
    fn campaign(&mut self, id: NodeId) -> Result<()> {
        for _ in 0..3 {
            let at = *self.node(id)?.timers.get(&Timer::Election).ok_or("no election timer")?;
            self.now = self.now.max(at);
            let now = self.now;
            self.node(id)?.fire(Timer::Election, now);
            self.collect(id)?;
            let again = *self.node(id)?.timers.get(&Timer::Election).ok_or("no election timer")?;
            if again > now + Duration::from_millis(999) {
                break;
            }
        }
        Ok(())
    }

    /// `fire n1 heartbeat`
    fn fire(&mut self, args: &mut Args<'_>) -> Result<()> {
        let id = args.node()?;
        let timer = match args.0.next_pos() {
            Some("election") => Timer::Election,
            Some("heartbeat") => Timer::Heartbeat,
            other => return Err(format!("which timer? {other:?}").into()),
        };
        let at = *self.node(id)?.timers.get(&timer).ok_or("that timer is not running")?;
        self.now = self.now.max(at);
        let now = self.now;
        self.node(id)?.fire(timer, now);
        self.collect(id)
    }

    fn propose(&mut self, args: &mut Args<'_>) -> Result<()> {
        let id = args.node()?;
        let commands: Vec<u64> = std::iter::from_fn(|| args.0.next_pos())
            .map(str::parse)
            .collect::<std::result::Result<_, _>>()?;
        let now = self.now;
        let places = self.node(id)?.with(now, |replica, out| {
            commands.into_iter().map(|c| replica.propose(c, out)).collect::<Vec<_>>()
        });
        for place in places.ok_or("down")? {
            match place {
                Some((index, term)) => writeln!(self.out, "{id} appends at {index} in {term}")?,
                None => writeln!(self.out, "{id} refuses")?,
            }
        }
        self.collect(id)
    }

    fn is_wanted(args: &mut Args<'_>) -> Result<impl Fn(NodeId, NodeId, &str) -> bool + use<>> {
        let (from, to) = (args.list("from")?, args.list("to")?);
        let kind = args.key("kind");
        Ok(move |sender: NodeId, receiver: NodeId, name: &str| {
            from.as_ref().is_none_or(|from| from.contains(&sender))
                && to.as_ref().is_none_or(|to| to.contains(&receiver))
                && kind.as_ref().is_none_or(|kind| kind == name)
        })
    }

    /// `deliver [from=n1] [to=n2] [kind=AppendEntries] [once]`: what matches, and what follows from
    /// it, until nothing matches any more.
    fn deliver(&mut self, args: &mut Args<'_>) -> Result<()> {
        let once = args.0.next_pos().map(|word| word == "once");
        let wanted = Self::is_wanted(args)?;
        let mut budget = if once == Some(true) { self.net.len() } else { 2_000 };
        let mut at = 0;
        while let Some((from, to, msg)) = self.net.get(at) {
            if !wanted(*from, *to, msg.kind()) {
                at += 1;
                continue;
            }
            if budget == 0 {
                break;
            }
            budget -= 1;
            let Some((from, to, msg)) = self.net.remove(at) else { break };
            let is_lost = self.cut.contains(&(from, to)) || !self.node(to)?.is_up();
            let lost = if is_lost { " (lost)" } else { "" };
            writeln!(self.out, "{from} to {to}: {msg}{lost}")?;
            if !is_lost {
                let now = self.now;
                self.node(to)?.with(now, |replica, out| replica.step(from, msg, out));
                self.collect(to)?;
            }
            if once.is_none() {
                at = 0;
            }
        }
        Ok(())
    }

    fn drop(&mut self, args: &mut Args<'_>) -> Result<()> {
        let wanted = Self::is_wanted(args)?;
        for (from, to, msg) in std::mem::take(&mut self.net) {
            if wanted(from, to, msg.kind()) {
                writeln!(self.out, "{from} to {to}: {msg} (dropped)")?;
            } else {
                self.net.push_back((from, to, msg));
            }
        }
        Ok(())
    }

    /// Every message under way that matches is there twice.
    fn repeat(&mut self, args: &mut Args<'_>) -> Result<()> {
        let wanted = Self::is_wanted(args)?;
        let again: Vec<_> = self
            .net
            .iter()
            .filter(|(from, to, msg)| wanted(*from, *to, msg.kind()))
            .cloned()
            .collect();
        self.net.extend(again);
        Ok(())
    }

    /// `cut n1 n2`: nothing passes between them and the others; `from=n1 to=n2`: one way.
    fn cut(&mut self, args: &mut Args<'_>) -> Result<()> {
        let (from, to) = (args.list("from")?, args.list("to")?);
        if let (Some(from), Some(to)) = (from, to) {
            self.cut.extend(from.iter().flat_map(|&a| to.iter().map(move |&b| (a, b))));
            return Ok(());
        }
        let side = args.nodes()?;
        for &a in self.nodes.keys() {
            for &b in self.nodes.keys() {
                if side.contains(&a) != side.contains(&b) {
                    self.cut.insert((a, b));
                }
            }
        }
        Ok(())
    }

    /// `disk slow n1`, `disk fast n1`
    fn disk(&mut self, args: &mut Args<'_>) -> Result<()> {
        let speed = args.0.next_pos();
        for id in args.nodes()? {
            match speed {
                Some("slow") => {
                    self.slow.insert(id);
                }
                Some("fast") => {
                    self.slow.remove(&id);
                    self.sync(id)?;
                }
                other => return Err(format!("slow or fast, not {other:?}").into()),
            }
        }
        Ok(())
    }

    fn sync(&mut self, id: NodeId) -> Result<()> {
        let now = self.now;
        let node = self.node(id)?;
        let count = node.disk.pending();
        node.sync(Ticket(u64::MAX), now);
        writeln!(self.out, "{id} has made {count} writes durable")?;
        self.collect(id)
    }

    /// `crash n1 [keep=1]`: of the writes that are not durable, the first `keep` survive.
    fn crash(&mut self, args: &mut Args<'_>) -> Result<()> {
        let keep = usize::try_from(args.number("keep", 0)?)?;
        for id in args.nodes()? {
            let node = self.node(id)?;
            let pending = node.disk.pending();
            node.crash(keep);
            writeln!(self.out, "{id} loses {} writes", pending.saturating_sub(keep))?;
        }
        Ok(())
    }

    /// `change n1 voters="n1 n2" learners="n3"`
    fn change(&mut self, args: &mut Args<'_>) -> Result<()> {
        let id = args.node()?;
        let voters = args.list("voters")?.unwrap_or_default();
        let learners = args.list("learners")?.unwrap_or_default();
        let now = self.now;
        let result =
            self.node(id)?.with(now, |replica, out| replica.change_members(voters, learners, out));
        if let Err(error) = result.ok_or("down")? {
            writeln!(self.out, "{id} refuses: {error}")?;
        }
        self.collect(id)
    }

    fn state(&mut self) -> Result<()> {
        for node in self.nodes.values() {
            match &node.replica {
                Some(replica) => writeln!(self.out, "{replica}")?,
                None => writeln!(self.out, "{} down", node.id)?,
            }
        }
        Ok(())
    }

    /// `log n1`: the terms of its entries.
    fn log(&mut self, args: &mut Args<'_>) -> Result<()> {
        let mut ids = args.nodes()?;
        if ids.is_empty() {
            ids.extend(self.nodes.keys());
        }
        for id in ids {
            let replica = self.node(id)?.replica.as_ref().ok_or("down")?;
            let indexes = (replica.base_index().0 + 1..=replica.last_index().0).map(Index);
            let terms = indexes.filter_map(|index| replica.entry(index));
            let terms: Vec<String> = terms.map(|entry| entry.term.0.to_string()).collect();
            writeln!(self.out, "{id}: {}", terms.join(" "))?;
        }
        Ok(())
    }

    /// What a node did: writes are made durable at once unless its disk is slow.
    fn collect(&mut self, id: NodeId) -> Result<()> {
        let now = self.now;
        let is_slow = self.slow.contains(&id);
        let node = self.nodes.get_mut(&id).ok_or("no such node")?;
        for _ in 0..100 {
            if is_slow || node.disk.pending() == 0 {
                break;
            }
            node.sync(Ticket(u64::MAX), now);
        }
        for (to, msg) in std::mem::take(&mut node.sent) {
            self.net.push_back((id, to, msg));
        }
        for told in std::mem::take(&mut node.told) {
            match told {
                Told::Chosen { index, term, payload } => {
                    let what = match payload {
                        Payload::Noop => "noop".into(),
                        Payload::Members(members) => format!("members {members}"),
                        Payload::Command(command) => format!("command {command}"),
                    };
                    writeln!(self.out, "  {id} chosen {index}:{term} {what}")?;
                }
                Told::Leading { term } => writeln!(self.out, "  {id} leading {term}")?,
                Told::Deposed { term } => writeln!(self.out, "  {id} deposed {term}")?,
                Told::ReadReady { id: read, applied } => {
                    writeln!(self.out, "  {id} read {read} ready at {applied}")?;
                }
                Told::ReadFailed { id: read } => writeln!(self.out, "  {id} read {read} failed")?,
                Told::SnapshotWanted { to } => {
                    writeln!(self.out, "  {id} asked for a piece for {to}")?;
                }
                Told::SnapshotBegun => writeln!(self.out, "  {id} clears its state")?,
                Told::SnapshotDone { index } => {
                    writeln!(self.out, "  {id} has the state of {index}")?;
                }
            }
        }
        Ok(())
    }
}

#[test]
fn golden() {
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/replication/testdata");
    let mut scripts: Vec<_> =
        std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    scripts.sort();
    assert!(scripts.len() >= 25, "only {} scripts in {folder}", scripts.len());
    let mut failed = Vec::new();
    for script in scripts {
        let run = || goldenscript::run(&mut Script::default(), &script);
        let name = script.file_name().unwrap().to_string_lossy().into_owned();
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
            Ok(Ok(())) => {}
            Ok(Err(error)) => failed.push(format!("{name}: {error}")),
            Err(_) => failed.push(format!("{name}: panicked or differs")),
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

/// The random test hardly ever meets the moment in which this matters, so a script does.
#[test]
fn a_voter_that_forgets_its_promise_at_a_restart_is_caught() {
    let path = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/src/replication/testdata/lease_restarted_voter_protects_leader.txt"
    );
    let script = std::fs::read_to_string(path).unwrap();
    let mut runner = Script::default();
    runner.mutations.enable("vote_after_restart");
    let broken = goldenscript::generate(&mut runner, &script).unwrap();
    // Two nodes may serve at the same time: the lease of n1 runs while n3 leads.
    let leads = broken.find("n3 leading t2").expect("n3 is elected");
    assert!(broken[leads..].contains("n1 has a lease"), "{broken}");
}
