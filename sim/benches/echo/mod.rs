//! The cheapest possible protocol: every server exchanges messages with every other server all the
//! time, and has a running timer.

use std::fmt;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::TxnId;
use orthodrome_core::machine::{Cx, Input, Machine, Message, Protocol, Setup};
use orthodrome_core::time::Duration;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Echo;

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Msg([u64; 8]);

impl Message for Msg {
    fn kind(&self) -> &'static str {
        "Echo"
    }

    fn txn(&self) -> Option<TxnId> {
        None
    }

    fn wire_size(&self) -> usize {
        64
    }

    fn keys(&self) -> usize {
        1
    }
}

impl Protocol for Echo {
    const NAMES: &'static [&'static str] = &["echo"];
    type Config = ();
    type Msg = Msg;
    type Timer = u8;
    type Record = ();
    type Note = ();
    type Client = Node;
    type Server = Node;

    fn configure(_: &Cluster, _: &str) {}

    fn name((): &()) -> &'static str {
        "echo"
    }

    fn mutations(_: &str) -> &'static [&'static str] {
        &[]
    }

    fn enable_mutation((): &mut (), _: &str) {}

    fn record_size((): &()) -> usize {
        0
    }
}

#[derive(Debug)]
pub struct Node {
    answered: u64,
}

const TICK: Duration = Duration::from_millis(10);

impl Machine<Echo> for Node {
    fn new(setup: Setup<Echo>, _: Vec<()>, cx: &mut Cx<'_, Echo>) -> Self {
        cx.set_timer(0, cx.now() + TICK);
        for node in setup.cluster.servers().filter(|node| node.id > setup.node) {
            for number in 0..8 {
                cx.send(node.id, Msg([number; 8]));
            }
        }
        Self { answered: 0 }
    }

    fn step(&mut self, input: Input<Echo>, cx: &mut Cx<'_, Echo>) {
        match input {
            Input::Message { from, msg } => {
                self.answered += 1;
                cx.send(from, msg);
            }
            Input::Timer(timer) => cx.set_timer(timer, cx.now() + TICK),
            Input::Begin(_)
            | Input::Read { .. }
            | Input::Decide { .. }
            | Input::Resolve { .. }
            | Input::Durable(_)
            | Input::Admin(_) => {}
        }
    }

    fn flush(&mut self, _: &mut Cx<'_, Echo>) {}

    fn assert_invariants(&self) {}
}

impl fmt::Display for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "answered={}", self.answered)
    }
}
