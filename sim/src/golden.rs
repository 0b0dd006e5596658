//! Golden scripts: a text file drives a protocol step by step, and the results are written back into
//! it. One file describes one behaviour, and its diff is reviewed like code.
//!
//! A script starts a cluster and then gives commands (goldenscript syntax: commands, `---`,
//! results):
//!
//! | command | effect |
//! |---|---|
//! | `cluster [regions=3] [rtt=100] [topology=NAME] [servers=1] [gateways=1] [partitions=1] [replicas=3] [shares=1] [mutation=T] [hide="A,B"] [steps]` | starts every node. What `hide` names is not shown: kinds of messages, `timer`, `durable`, `note`. With `steps`, messages, flushes and timers wait for commands; without, they take their time under `run` |
//! | `begin GATEWAY TXN [read="a,b"] [write="a,b"] [ro] [stale] [general] [put="k:v,…"] [add="k:n,…"] [high] [below=N] [knows=T] [absent=T]` | begins a transaction: interactive; read-only with `ro`, of any consistent state with `stale`; general with `general`; a procedure with `put` or `add`; its client knows of versions of its keys at the timestamp `knows`, or that its keys were absent at `absent` |
//! | `read TXN KEY…` | the next round of a general transaction |
//! | `decide TXN [k=v …] [abort]` | answers the reads of an interactive or general transaction |
//! | `resolve GATEWAY TXN [saw="a:TXN@T,…"]` | asks another gateway for the outcome of a transaction whose client has read these versions |
//! | `run [for=MS] [until=MS] [quiet]` | lets time pass; shows nothing if `quiet` |
//! | `messages` | lists what is in flight (with `steps`) |
//! | `deliver [N…] [kind=K] [from=n1] [to=n2] [txn=c1.1] [all]` | delivers what is in flight and matches; with `all`, also what is sent thereby, until nothing is left |
//! | `drop …` | loses what matches |
//! | `duplicate …` | delivers what matches, and keeps it in flight |
//! | `durable [NODE…]` | completes flushes, of every node if none is named (with `steps`) |
//! | `fire NODE [COUNT]` | moves time to a node's earliest timer and expires it |
//! | `advance MS` | moves time, and nothing else (with `steps`) |
//! | `crash NODE… [keep] [lost]`, `restart NODE…` | a power cut: unflushed records are lost, unless `keep` is given; with `lost` all records are lost. Then a start |
//! | `pause NODE…`, `resume NODE…` | pauses nodes; resumes them |
//! | `partition from="n1,n2" [to=n3] [oneway]`, `heal` | cuts links; heals all |
//! | `clock NODE by=MS` | a clock jumps |
//! | `slow-disk NODE… by=MS` | flushes that begin from now on take this much longer; 0 ends it |
//! | `transfer PARTITION NODE`, `members PARTITION voters="n1,n2" [learners=n3]` | an operator's orders |
//! | `state [NODE…]`, `timers [NODE…]` | shows machines; servers if none is named |
//! | `auto` | ends step-by-step control |
//!
//! Timestamps count from 1 ms before the start, so that `@1000000` is time zero.

use std::cell::RefCell;
use std::error::Error;
use std::fmt::Write as _;
use std::path::Path;
use std::rc::Rc;

use goldenscript::{Argument, ArgumentConsumer, Command, Context, Runner};
use orthodrome_core::cluster::{Cluster, Role};
use orthodrome_core::id::{NodeId, RegionId, TxnId};
use orthodrome_core::machine::{Admin, Input, Message, Protocol};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::session::Floor;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;
use orthodrome_core::trace::{Event, Line};
use orthodrome_core::txn::{Decision, Key, Op, Priority, Read, Reads, Txn, Value, Version};
use orthodrome_eval::workload::{Issuer, Request, Values, Workload};

use crate::clock::ClockModel;
use crate::fault::Schedule;
use crate::network::Disturbance;
use crate::simulation::{Flight, InFlight, Options, Simulation};

/// Runs the script at `path` for the protocol's variant `name`.
///
/// # Errors
/// If the script is wrong. A result that differs from the script's is a panic that shows the
/// difference. If `UPDATE_GOLDENFILES=1` is set, the result is written back instead.
pub fn run<P: Protocol>(name: &'static str, path: impl AsRef<Path>) -> std::io::Result<()> {
    goldenscript::run(&mut Golden::<P>::new(name), path)
}

/// Runs every script (`*.txt`) in a folder.
///
/// # Errors
/// If a folder or script cannot be read.
///
/// # Panics
/// If a script's result differs, or if there is no script.
pub fn run_all<P: Protocol>(name: &'static str, folder: impl AsRef<Path>) -> std::io::Result<()> {
    let mut paths: Vec<_> = std::fs::read_dir(folder.as_ref())?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|ending| ending == "txt"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "no golden scripts in {}", folder.as_ref().display());
    paths.into_iter().try_for_each(|path| run::<P>(name, path))
}

/// The result of a script, without comparing it.
///
/// # Errors
/// If the script is wrong.
pub fn generate<P: Protocol>(name: &'static str, script: &str) -> std::io::Result<String> {
    goldenscript::generate(&mut Golden::<P>::new(name), script)
}

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

/// A cluster under a script's control.
struct Golden<P: Protocol> {
    name: &'static str,
    run: Option<Simulation<P>>,
    output: Rc<RefCell<String>>,
    begun: OrdMap<TxnId, Begun>,
}

/// A transaction that the script submitted.
struct Begun {
    txn: Txn,
    gateway: NodeId,
    decision: Option<Decision>,
}

/// No workload: scripts submit transactions themselves.
#[derive(Debug)]
struct NoWorkload;

impl Workload for NoWorkload {
    fn name(&self) -> String {
        "script".into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn next(&mut self, _: Issuer, _: &mut Rng) -> Request {
        unreachable!("a script's load begins nothing by itself")
    }

    fn decide(&self, _: &Request, _: &Reads) -> Decision {
        Decision::Abort
    }

    fn audit(&self, _: &Request, _: &Reads) -> Result<(), String> {
        Ok(())
    }

    fn final_requests(&self) -> Vec<Request> {
        Vec::new()
    }
}

impl<P: Protocol> Runner for Golden<P> {
    type Command = Command;

    fn run(&mut self, command: &Command, _: &Context) -> Outcome<String> {
        let mut args = command.consume_args();
        match command.name.as_str() {
            "cluster" => self.cluster(&mut args)?,
            "begin" => self.begin(&mut args)?,
            "read" => self.read(&mut args)?,
            "decide" => self.decide(&mut args)?,
            "resolve" => self.resolve(&mut args)?,
            "run" => self.pass(&mut args)?,
            "messages" => self.messages()?,
            "deliver" => self.deliver(&mut args, true, false)?,
            "drop" => self.deliver(&mut args, false, false)?,
            "duplicate" => self.deliver(&mut args, true, true)?,
            "durable" => self.durable(&mut args)?,
            "fire" => self.fire(&mut args)?,
            "advance" => self.advance(&mut args)?,
            "crash" => self.crash(&mut args)?,
            "restart" => self.restart(&mut args)?,
            "pause" => self.pause(&mut args)?,
            "resume" => self.resume(&mut args)?,
            "partition" => self.partition(&mut args)?,
            "heal" => self.heal()?,
            "clock" => self.clock(&mut args)?,
            "slow-disk" => self.slow_disk(&mut args)?,
            "transfer" => self.transfer(&mut args)?,
            "members" => self.members(&mut args)?,
            "state" => self.state(&mut args)?,
            "timers" => self.timers(&mut args)?,
            "auto" => self.simulation()?.give_control_back(),
            other => return Err(format!("{other:?} is no command; see `sim::golden`").into()),
        }
        args.reject_next()?;
        if let Some(failure) = self.run.as_mut().and_then(|run| run.env.failure.take()) {
            return Err(failure.to_string().into());
        }
        Ok(self.output.take())
    }
}

impl<P: Protocol> Golden<P> {
    fn new(name: &'static str) -> Self {
        Self { name, run: None, output: Rc::default(), begun: OrdMap::new() }
    }

    fn simulation(&mut self) -> Outcome<&mut Simulation<P>> {
        self.run.as_mut().ok_or_else(|| "there is no cluster yet; begin with `cluster`".into())
    }

    fn say(&self, line: &str) {
        let mut output = self.output.borrow_mut();
        output.push_str(line);
        output.push('\n');
    }

    fn cluster(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let cluster = cluster(args, if P::REPLICATED { 3 } else { 1 })?;
        let mut config = P::configure(&cluster, self.name);
        if let Some(mutation) = args.take_key("mutation") {
            if !P::mutations(self.name).contains(&mutation) {
                return Err(format!("{mutation:?} is not a mutation of this protocol").into());
            }
            P::enable_mutation(&mut config, mutation);
        }
        let hidden: Vec<String> = args
            .take_key("hide")
            .map(|names| names.split(',').map(str::to_owned).collect())
            .unwrap_or_default();
        let steps = match args.next_pos() {
            None => false,
            Some("steps") => true,
            Some(other) => return Err(format!("unexpected argument {other:?}").into()),
        };
        let clock = ClockModel {
            error: Duration::from_millis(1),
            skew: Duration::ZERO,
            epoch: 1_000_000,
            ..ClockModel::default()
        };
        let options = Options { cpu: None, clock, invariants_every: 1, ..Options::default() };
        let mut run = Simulation::<P>::new(
            cluster,
            config,
            Box::new(NoWorkload),
            &Schedule::default(),
            options,
        )?;
        let output = Rc::clone(&self.output);
        run.keep_trace(Box::new(move |line| {
            let event = line.event.to_string();
            if !hidden.iter().any(|name| *name == line.kind || *name == event) {
                let _ = writeln!(output.borrow_mut(), "{}", Short(line, steps));
            }
        }));
        if steps {
            let output = Rc::clone(&self.output);
            let ids: Vec<NodeId> = run.cluster.nodes().map(|node| node.id).collect();
            run.take_control(Box::new(move |number, flight| {
                let _ = writeln!(output.borrow_mut(), "{}", sending(number, flight, &ids));
            }));
        }
        self.start(run);
        Ok(())
    }

    fn start(&mut self, mut run: Simulation<P>) {
        self.begun.clear();
        run.start_nodes();
        self.run = Some(run);
        // The start of the nodes is not shown.
        let news = self.output.take();
        for line in news.lines().filter(|line| !line.ends_with(" start")) {
            self.say(line);
        }
    }

    /// Dense number of a node of the cluster.
    fn index(&mut self, name: &str) -> Outcome<u32> {
        let id: NodeId = name.parse()?;
        let mut nodes = (0_u32..).zip(self.simulation()?.cluster.nodes());
        let found = nodes.find(|(_, node)| node.id == id).map(|(index, _)| index);
        found.ok_or_else(|| format!("{id} is not in the cluster").into())
    }

    fn indices(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome<Vec<u32>> {
        let mut found = Vec::new();
        while let Some(name) = args.next_pos() {
            found.push(self.index(name)?);
        }
        Ok(found)
    }

    fn begin(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let gateway: NodeId = args.next_pos().ok_or("begin which GATEWAY")?.parse()?;
        let id: TxnId = args.next_pos().ok_or("begin which TXN")?.parse()?;
        let index = self.index(&gateway.to_string())?;
        let home = self.simulation()?.cluster.region_of(gateway);
        let mut txn = transaction(id, home, args)?;
        txn.acknowledged_below = number(args.take_key("below"), id.counter)?;
        let (knows, absent) = (args.take_key("knows"), args.take_key("absent"));
        let is_deletion = absent.is_some();
        let timestamp = Timestamp(number(knows.or(absent), 0)?);
        if timestamp != Timestamp::ZERO {
            let floor = Floor { timestamp, is_deletion };
            let keys = txn.reads.iter().chain(&txn.writes);
            txn.floors = keys.map(|key| (key.clone(), floor)).collect();
        }
        let begun = Begun { txn: txn.clone(), gateway, decision: None };
        self.begun.insert(id, begun);
        self.simulation()?.call(index, Input::Begin(txn), 0);
        Ok(())
    }

    fn read(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let txn: TxnId = args.next_pos().ok_or("read in which TXN")?.parse()?;
        let mut keys = Vec::new();
        while let Some(key) = args.next_pos() {
            keys.push(Key::from(key));
        }
        let begun = self.begun.get(&txn).ok_or_else(|| format!("{txn} was not begun"))?;
        let gateway = begun.gateway.to_string();
        let index = self.index(&gateway)?;
        self.simulation()?.call(index, Input::Read { txn, keys }, 0);
        Ok(())
    }

    fn decide(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let txn: TxnId = args.next_pos().ok_or("decide which TXN")?.parse()?;
        let mut decision = Decision::Commit(OrdMap::new());
        for argument in args.by_ref() {
            match (argument, &mut decision) {
                (Argument::KeyValue(key, value), Decision::Commit(writes)) => {
                    let value = (!value.is_empty()).then(|| Value::from(value.as_str()));
                    writes.insert(Key::from(key.as_str()), value);
                }
                (Argument::Positional(word), _) if word == "abort" => decision = Decision::Abort,
                (other, _) => return Err(format!("unexpected argument {other}").into()),
            }
        }
        let begun = self.begun.get_mut(&txn).ok_or_else(|| format!("{txn} was not begun"))?;
        begun.decision = Some(decision.clone());
        let gateway = begun.gateway.to_string();
        let index = self.index(&gateway)?;
        self.simulation()?.call(index, Input::Decide { txn, decision }, 0);
        Ok(())
    }

    fn resolve(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let index = self.index(args.next_pos().ok_or("resolve at which GATEWAY")?)?;
        let id: TxnId = args.next_pos().ok_or("resolve which TXN")?.parse()?;
        let begun = self.begun.get(&id).ok_or_else(|| format!("{id} was not begun"))?;
        let (txn, decision) = (begun.txn.clone(), begun.decision.clone());
        let saw = args.take_key("saw");
        let reads = saw.into_iter().flat_map(|text| text.split(',')).map(|text| {
            let form = "write what it saw as key:writer@timestamp";
            let (key, version) = text.split_once(':').ok_or(form)?;
            let (writer, timestamp) = version.split_once('@').ok_or(form)?;
            let timestamp = Timestamp(timestamp.parse()?);
            let version = Version { timestamp, writer: writer.parse()? };
            Ok((Key::from(key), Read::without_value(version)))
        });
        let reads: Outcome<Reads> = reads.collect();
        let input = Input::Resolve { txn, reads: reads?, decision };
        self.simulation()?.call(index, input, 0);
        Ok(())
    }

    fn pass(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let run = self.simulation()?;
        let until = match (args.take_key("for"), args.take_key("until")) {
            (Some(span), None) => run.now() + millis(span)?,
            (None, Some(until)) => Time::ZERO + millis(until)?,
            (Some(_), Some(_)) | (None, None) => return Err("give `for` or `until`".into()),
        };
        run.run_until(until)?;
        match args.next_pos() {
            None => {}
            Some("quiet") => self.output.borrow_mut().clear(),
            Some(other) => return Err(format!("unexpected argument {other:?}").into()),
        }
        Ok(())
    }

    fn messages(&mut self) -> Outcome {
        let run = self.simulation()?;
        let ids: Vec<NodeId> = run.cluster.nodes().map(|node| node.id).collect();
        let held = &run.env.manual.as_ref().ok_or(NOT_STEPS)?.held;
        let lines: Vec<String> = held.iter().map(|(n, flight)| sending(*n, flight, &ids)).collect();
        lines.iter().for_each(|line| self.say(line));
        Ok(())
    }

    fn deliver(&mut self, args: &mut ArgumentConsumer<'_>, arrives: bool, stays: bool) -> Outcome {
        let (choice, all) = Choice::parse(args)?;
        // More rounds than any protocol needs for the transactions of one script.
        for _ in 0..if all { 1_000 } else { 1 } {
            let run = self.simulation()?;
            let network = &run.env.network;
            let ids: Vec<NodeId> = run.cluster.nodes().map(|node| node.id).collect();
            let held = &run.env.manual.as_ref().ok_or(NOT_STEPS)?.held;
            let is_wanted = |(number, flight): &&(u32, Flight<P>)| {
                let open = !arrives || !network.is_blocked(flight.from, flight.to);
                open && choice.matches(*number, flight, &ids)
            };
            let wanted: Vec<u32> = held.iter().filter(is_wanted).map(|(n, _)| *n).collect();
            if wanted.is_empty() {
                if !all {
                    return Err("nothing in flight matches".into());
                }
                return Ok(());
            }
            for number in wanted {
                run.step_message(number, arrives, stays);
            }
        }
        if all { Err("messages without end".into()) } else { Ok(()) }
    }

    fn durable(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let mut nodes = self.indices(args)?;
        let run = self.simulation()?;
        run.env.manual.as_ref().ok_or(NOT_STEPS)?;
        let is_named = !nodes.is_empty();
        if !is_named {
            nodes = (0..u32::try_from(run.nodes.len())?).collect();
        }
        for index in nodes {
            if !run.flush_disk(index) && is_named {
                return Err(format!("{} has nothing to flush", run.env.id(index)).into());
            }
        }
        Ok(())
    }

    fn fire(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let index = self.index(args.next_pos().ok_or("fire at which NODE")?)?;
        let count = number(args.next_pos(), 1)?;
        let run = self.simulation()?;
        run.env.manual.as_ref().ok_or(NOT_STEPS)?;
        for _ in 0..count {
            if !run.fire_first(index) {
                return Err(format!("{} has no timer", run.env.id(index)).into());
            }
        }
        Ok(())
    }

    fn advance(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let span = millis(args.next_pos().ok_or("advance by how many MS")?)?;
        let run = self.simulation()?;
        run.env.manual.as_ref().ok_or(NOT_STEPS)?;
        run.env.now = run.env.now + span;
        Ok(())
    }

    fn crash(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let mut names = Vec::new();
        let (mut keep, mut lost) = (false, false);
        while let Some(name) = args.next_pos() {
            match name {
                "keep" => keep = true,
                "lost" => lost = true,
                name => names.push(self.index(name)?),
            }
        }
        let run = self.simulation()?;
        for index in names {
            run.node(index).disk.settle(keep);
            run.node(index).held_down += 1;
            run.crash(index, false);
            if lost {
                run.node(index).disk.replace();
            }
            if let Some(manual) = &mut run.env.manual {
                manual.held.retain(|(_, flight)| flight.to != index);
            }
        }
        Ok(())
    }

    fn restart(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        for index in self.indices(args)? {
            let run = self.simulation()?;
            run.node(index).held_down = 0;
            run.start_node(index);
        }
        Ok(())
    }

    fn pause(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        for index in self.indices(args)? {
            self.simulation()?.node(index).paused += 1;
        }
        Ok(())
    }

    fn resume(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        for index in self.indices(args)? {
            let run = self.simulation()?;
            run.node(index).paused = 0;
            run.resume(index);
        }
        Ok(())
    }

    fn partition(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let mut list = |text: Option<&str>| -> Outcome<Vec<u32>> {
            text.into_iter().flat_map(|text| text.split(',')).map(|name| self.index(name)).collect()
        };
        let (from, mut to) = (list(args.take_key("from"))?, list(args.take_key("to"))?);
        let one_way = match args.next_pos() {
            None => false,
            Some("oneway") => true,
            Some(other) => return Err(format!("unexpected argument {other:?}").into()),
        };
        let run = self.simulation()?;
        if to.is_empty() {
            to = (0..u32::try_from(run.nodes.len())?).filter(|n| !from.contains(n)).collect();
        }
        let by = Disturbance { blocked: true, ..Disturbance::default() };
        for &a in &from {
            for &b in to.iter().filter(|&&b| b != a) {
                run.env.network.disturb(a, b, by);
                if !one_way {
                    run.env.network.disturb(b, a, by);
                }
            }
        }
        Ok(())
    }

    fn heal(&mut self) -> Outcome {
        let run = self.simulation()?;
        let now = run.now();
        let count = u32::try_from(run.nodes.len())?;
        for (from, to) in (0..count).flat_map(|a| (0..count).map(move |b| (a, b))) {
            let released = run.env.network.calm_all(now, from, to);
            run.release(released);
        }
        Ok(())
    }

    fn clock(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let index = self.index(args.next_pos().ok_or("the clock of which NODE")?)?;
        let by: i64 = args.take_key("by").ok_or("by how many MS")?.parse()?;
        self.simulation()?.node(index).clock.step(by.saturating_mul(1_000_000));
        Ok(())
    }

    fn slow_disk(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let by: u64 = args.take_key("by").ok_or("by how many MS")?.parse()?;
        for index in self.indices(args)? {
            self.simulation()?.node(index).disk.slow_down(Duration::from_millis(by));
        }
        Ok(())
    }

    fn transfer(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let partition = args.next_pos().ok_or("transfer which PARTITION")?.parse()?;
        let to: NodeId = args.next_pos().ok_or("transfer to which NODE")?.parse()?;
        self.order(Admin::TransferLeader { partition, to })
    }

    fn members(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        let partition = args.next_pos().ok_or("members of which PARTITION")?.parse()?;
        let list = |text: Option<&str>| -> Outcome<Vec<NodeId>> {
            let names = text.into_iter().flat_map(|text| text.split(','));
            names.map(|name| Ok(name.parse()?)).collect()
        };
        let (voters, learners) = (list(args.take_key("voters"))?, list(args.take_key("learners"))?);
        self.order(Admin::ChangeMembers { partition, voters, learners })
    }

    /// Gives an operator's order to every server.
    fn order(&mut self, order: Admin) -> Outcome {
        let run = self.simulation()?;
        for index in 0..u32::try_from(run.nodes.len())? {
            if run.node(index).role == Role::Server {
                run.input(index, Input::Admin(order.clone()), 0);
            }
        }
        Ok(())
    }

    /// The named nodes, or every server.
    fn chosen(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome<Vec<NodeId>> {
        let named: Vec<NodeId> = self
            .indices(args)?
            .into_iter()
            .map(|index| Ok(self.simulation()?.env.id(index)))
            .collect::<Outcome<_>>()?;
        if !named.is_empty() {
            return Ok(named);
        }
        Ok(self.simulation()?.cluster.servers().map(|node| node.id).collect())
    }

    fn state(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        for node in self.chosen(args)? {
            let state = self.simulation()?.state_of(node);
            self.say(&format!("{node}: {state}"));
        }
        Ok(())
    }

    fn timers(&mut self, args: &mut ArgumentConsumer<'_>) -> Outcome {
        for node in self.chosen(args)? {
            for (at, timer) in self.simulation()?.timers_of(node) {
                self.say(&format!("{node}: {at} {timer}"));
            }
        }
        Ok(())
    }
}

const NOT_STEPS: &str = "this needs a cluster with `steps`";

/// The messages that a command selects.
#[derive(Default)]
struct Choice {
    numbers: Vec<u32>,
    kind: Option<String>,
    from: Option<NodeId>,
    to: Option<NodeId>,
    txn: Option<TxnId>,
}

impl Choice {
    fn parse(args: &mut ArgumentConsumer<'_>) -> Outcome<(Self, bool)> {
        let mut choice = Self {
            numbers: Vec::new(),
            kind: args.take_key("kind").map(Into::into),
            from: args.take_key("from").map(str::parse).transpose()?,
            to: args.take_key("to").map(str::parse).transpose()?,
            txn: args.take_key("txn").map(str::parse).transpose()?,
        };
        let mut all = false;
        while let Some(word) = args.next_pos() {
            if word == "all" { all = true } else { choice.numbers.push(word.parse()?) }
        }
        Ok((choice, all))
    }

    fn matches<P: Protocol>(&self, number: u32, flight: &InFlight<P>, ids: &[NodeId]) -> bool {
        let id = |index: u32| ids.get(index as usize).copied();
        (self.numbers.is_empty() || self.numbers.contains(&number))
            && self.kind.as_ref().is_none_or(|kind| kind == flight.msg.kind())
            && self.from.is_none_or(|from| id(flight.from) == Some(from))
            && self.to.is_none_or(|to| id(flight.to) == Some(to))
            && self.txn.is_none_or(|txn| flight.msg.txn() == Some(txn))
    }
}

/// A message that waits for a command.
fn sending<P: Protocol>(number: u32, flight: &InFlight<P>, ids: &[NodeId]) -> String {
    let id = |index: u32| ids.get(index as usize).copied().unwrap_or_default();
    format!("  {} -> {} [{number}] {:?}", id(flight.from), id(flight.to), flight.msg)
}

/// A line of the trace as goldens show it. With `steps`, times and details that were already shown
/// on sending are left out.
struct Short<'a>(&'a Line, bool);

impl std::fmt::Display for Short<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self(Line { at, node, event, peer, txn, kind, detail, .. }, steps) = self;
        let peer = peer.map(|peer| peer.to_string()).unwrap_or_default();
        let txn = txn.map(|txn| txn.to_string()).unwrap_or_default();
        if !steps {
            write!(f, "{at} ")?;
        }
        match event {
            Event::Receive if *steps => write!(f, "{node} <- {peer} {kind} {txn}"),
            Event::Receive => write!(f, "{node} <- {peer} {detail}"),
            Event::Lose => write!(f, "{node} -> {peer} lost {kind} {txn}"),
            Event::Begin => write!(f, "{node} begin {txn}"),
            Event::Read | Event::Decide | Event::Resolve => {
                write!(f, "{node} {event} {txn} {detail}")
            }
            Event::Timer | Event::Durable | Event::Note => write!(f, "{node} {event} {detail}"),
            Event::Reads => write!(f, "{node} reads {txn} {detail}"),
            Event::Finish => write!(f, "{node} finish {txn} {detail} ({kind})"),
            Event::Fault => write!(f, "{node} {kind}"),
        }
    }
}

/// The transaction that a `begin` describes.
fn transaction(id: TxnId, home: RegionId, args: &mut ArgumentConsumer<'_>) -> Outcome<Txn> {
    let keys = |text: Option<&str>| -> Vec<Key> {
        text.into_iter().flat_map(|text| text.split(',')).map(Key::from).collect()
    };
    let (reads, writes) = (keys(args.take_key("read")), keys(args.take_key("write")));
    let pairs = |text: Option<&str>| -> Outcome<Vec<(Key, String)>> {
        let pairs = text.into_iter().flat_map(|text| text.split(','));
        let pair = |pair: &str| {
            let (key, value) = pair.split_once(':').ok_or("write pairs as key:value")?;
            Ok((Key::from(key), value.to_owned()))
        };
        pairs.map(pair).collect()
    };
    let (puts, adds) = (pairs(args.take_key("put"))?, pairs(args.take_key("add"))?);
    let is_procedure = !puts.is_empty() || !adds.is_empty();
    let mut ops: Vec<Op> = Vec::new();
    if is_procedure {
        ops.extend(reads.iter().cloned().map(Op::Get));
    }
    ops.extend(puts.into_iter().map(|(key, value)| Op::Put(key, value.into())));
    for (key, amount) in adds {
        ops.push(Op::Add(key, amount.parse()?));
    }
    let mut words = Vec::new();
    while let Some(word) = args.next_pos() {
        words.push(word);
    }
    let mut txn = if is_procedure {
        Txn::procedure(id, home, ops)
    } else if words.contains(&"ro") {
        Txn::read_only(id, home, reads)
    } else if words.contains(&"stale") {
        Txn::stale_read_only(id, home, reads)
    } else if words.contains(&"general") {
        Txn::general(id, home, reads)
    } else {
        Txn::interactive(id, home, reads, writes)
    };
    let known = ["ro", "stale", "general", "high"];
    if let Some(other) = words.iter().find(|word| !known.contains(word)) {
        return Err(format!("unexpected argument {other:?}").into());
    }
    if words.contains(&"high") {
        txn.priority = Priority::HIGH;
    }
    Ok(txn)
}

/// The cluster that `cluster` describes, with this many replicas of each partition unless the
/// command says otherwise.
fn cluster(args: &mut ArgumentConsumer<'_>, replicas: u64) -> Outcome<Cluster> {
    let topology = match args.take_key("topology") {
        Some(name) => Topology::built_in(name)
            .ok_or_else(|| format!("there is no built-in topology {name:?}"))?,
        None => {
            let regions = number(args.take_key("regions"), 3)?;
            let rtt = number(args.take_key("rtt"), 100)?;
            let local = Duration::from_micros(500);
            Topology::uniform(u16::try_from(regions)?, local, Duration::from_millis(rtt))
        }
    };
    let mut count = |name: &str, default: u64| -> Outcome<u32> {
        Ok(u32::try_from(number(args.take_key(name), default)?)?)
    };
    let (servers, gateways) = (count("servers", 1)?, count("gateways", 1)?);
    let (partitions, replicas) = (count("partitions", 1)?, count("replicas", replicas)?);
    let shares = count("shares", 1)?;
    let cluster = Cluster::spread(topology, servers, gateways, partitions, replicas)?;
    Ok(cluster.divided(shares)?)
}

fn number(text: Option<&str>, default: u64) -> Outcome<u64> {
    Ok(text.map(str::parse).transpose()?.unwrap_or(default))
}

/// Milliseconds, possibly with decimals and a trailing `ms`.
fn millis(text: &str) -> Outcome<Duration> {
    let value: f64 = text.trim_end_matches("ms").parse()?;
    Ok(Duration::try_from_secs_f64(value / 1_000.0)?)
}
