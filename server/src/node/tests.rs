//! What becomes of callers when a node ends in the middle of something.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};

use orthodrome_core::machine::{Cx, Input, Machine, Message};
use orthodrome_core::topology::Topology;
use orthodrome_core::{Protocol, RegionId, Txn, TxnId, Wire};

use super::*;

/// A protocol whose gateway keeps its thread busy until the test lets it go on, or panics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stuck;

#[derive(Clone, PartialEq, Eq, Debug, Wire)]
struct Nothing(u64);

impl Message for Nothing {
    fn kind(&self) -> &'static str {
        "nothing"
    }
    fn txn(&self) -> Option<TxnId> {
        None
    }
    fn wire_size(&self) -> usize {
        8
    }
    fn keys(&self) -> usize {
        0
    }
}

/// Whether its gateway panics once it goes on.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Panics(bool);

impl Protocol for Stuck {
    const NAMES: &'static [&'static str] = &["stuck"];
    type Config = Panics;
    type Msg = Nothing;
    type Timer = ();
    type Record = Nothing;
    type Note = ();
    type Client = Gate;
    type Server = Gate;

    fn configure(_: &Cluster, _: &str) -> Panics {
        Panics(false)
    }
    fn name(_: &Panics) -> &'static str {
        "stuck"
    }
    fn mutations(_: &str) -> &'static [&'static str] {
        &[]
    }
    fn enable_mutation(_: &mut Panics, _: &str) {}
    fn record_size(_: &Nothing) -> usize {
        8
    }
}

/// Set while a gateway is busy; it goes on when told so.
static IS_BUSY: AtomicBool = AtomicBool::new(false);
static GO_ON: Mutex<Option<Receiver<()>>> = Mutex::new(None);

#[derive(Debug)]
struct Gate(Arc<Panics>);

impl fmt::Display for Gate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("gate")
    }
}

impl Machine<Stuck> for Gate {
    fn new(setup: Setup<Stuck>, _: Vec<Nothing>, _: &mut Cx<'_, Stuck>) -> Self {
        Self(setup.config)
    }
    fn step(&mut self, input: Input<Stuck>, _: &mut Cx<'_, Stuck>) {
        if let Input::Begin(_) = input {
            IS_BUSY.store(true, Ordering::SeqCst);
            let _ = GO_ON.lock().unwrap().take().unwrap().recv();
            assert!(!self.0.0, "as the test wants it");
        }
    }
    fn flush(&mut self, _: &mut Cx<'_, Stuck>) {}
    fn assert_invariants(&self) {}
}

async fn node(panics: bool) -> (NodeHandle, Sender<()>) {
    let (go_on, told) = channel();
    *GO_ON.lock().unwrap() = Some(told);
    IS_BUSY.store(false, Ordering::SeqCst);
    let topology = Topology::uniform(1, Duration::from_micros(100), Duration::from_millis(1));
    let map = Arc::new(Cluster::spread(topology, 1, 1, 1, 1).unwrap());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let (server, gateway) = (map.servers().next().unwrap().id, map.gateways().next().unwrap().id);
    let settings = Settings {
        cluster: "test".into(),
        map,
        node: server,
        endpoints: vec![Endpoint { node: server, gateway, address }],
        data_dir: PathBuf::new(),
        expected: Expected::Either,
        durability: Durability::None,
        verify_state: false,
        tls: None,
        emulate_wan: false,
        clock_error: Duration::from_millis(10),
        shared_clock: true,
        clock_skew: Arc::default(),
        in_flight_max: 100,
        bytes_in_flight_max: 1 << 20,
        workers: None,
        queue_bytes_max: 1 << 20,
    };
    (start::<Stuck>(settings, Panics(panics), listener).await.unwrap(), go_on)
}

fn txn(client: ClientId, counter: u64) -> Txn {
    Txn::interactive(TxnId::new(client, counter), RegionId(0), vec!["k".into()], vec![])
}

/// Begins two transactions: the gateway is busy with the first, and the second waits in its inbox.
async fn two_callers(
    node: &NodeHandle,
    client: ClientId,
) -> [tokio::task::JoinHandle<Result<(), GatewayError>>; 2] {
    let call = |counter| {
        let gateway = node.gateway();
        tokio::spawn(async move { gateway.begin(txn(client, counter)).await.map(drop) })
    };
    let first = call(1);
    while !IS_BUSY.load(Ordering::SeqCst) {
        tokio::task::yield_now().await;
    }
    let second = call(2);
    while node.parts.machine_status(Tag::Gateway).waiting == 0 {
        tokio::task::yield_now().await;
    }
    [first, second]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn callers_of_a_node_that_ends_learn_that_they_get_no_answer() {
    for panics in [false, true] {
        let (node, go_on) = node(panics).await;
        let client = node.gateway().register().await.unwrap();
        let callers = two_callers(&node, client).await;
        if !panics {
            node.parts.end();
        }
        go_on.send(()).unwrap();
        for (caller, counter) in callers.into_iter().zip(1..) {
            let answer = tokio::time::timeout(Duration::from_secs(60), caller).await;
            let answer = answer.expect("a caller waits for ever").unwrap();
            assert_eq!(
                answer,
                Err(GatewayError::Lost(txn(client, counter).id)),
                "panics: {panics}"
            );
        }
        node.kill().await;
    }
}
