//! Gateways for tests of the client: the real service, in front of a small serial store whose
//! answers a test can script, and behind a proxy whose connections a test can cut.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use orthodrome_core::machine::{Admin, Gauge, GroupView, MembershipOrder, Refusal, UNKNOWABLE};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{AbortReason, Kind, Read, Reads, Version, Writes};
use orthodrome_core::{
    ClientId, Cluster, Decision, Key, NodeId, Outcome, RegionId, Timestamp, Txn, TxnId,
};
use orthodrome_server::gateway::{
    Begun, Description, Finished, GatewayError, Health, OrderError, PendingTxns,
};
use orthodrome_server::service::{self, Access, Limits, Listeners, ServiceConfig, Transactions};
use orthodrome_server::transport::LinkStatus;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// What a gateway does with one call instead of executing it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Twist {
    /// Refuses it as too busy.
    Busy,
    /// Refuses it because it is stopping.
    Stopping,
    /// Answers that the outcome is unknown, and does nothing.
    Unknown,
    /// Answers that the outcome is forgotten, and does nothing.
    Forgotten,
    /// Aborts the transaction.
    Abort(AbortReason),
    /// Executes it, then cuts the connection instead of answering.
    DoAndCut,
    /// Cuts the connection instead of executing it.
    Cut,
    /// Never answers, and does nothing.
    Hang,
    /// Executes it on the initial data.
    Old,
    /// Executes it.
    Do,
}

/// The calls that a test can script.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Call {
    Begin,
    Read,
    Decide,
    Resolve,
}

#[derive(Default)]
pub struct Store {
    state: Mutex<State>,
    /// The node that accepts orders; 0 if no node leads.
    pub leader: Mutex<u32>,
    /// The leaders that nodes believe in which have not heard of a new one.
    pub stale: Mutex<OrdMap<NodeId, u32>>,
}

#[derive(Default)]
struct State {
    data: OrdMap<Key, Read>,
    open: OrdMap<TxnId, (Txn, Reads)>,
    ended: OrdMap<TxnId, Outcome>,
    clients: u64,
    clock: u64,
    /// Every call that arrived, with the transaction's name.
    calls: Vec<(Call, TxnId)>,
    acknowledged_below: u64,
    /// The region in which each transaction first began, and how often a later attempt named
    /// another region.
    homes: OrdMap<(ClientId, u64), RegionId>,
    moves: u32,
    /// How often each transaction's writes were applied.
    applied: OrdMap<(ClientId, u64), u32>,
}

impl State {
    fn read(&self, keys: &[Key]) -> Reads {
        let read = |key: &Key| (key.clone(), self.data.get(key).cloned().unwrap_or_default());
        keys.iter().map(read).collect()
    }

    fn commit(&mut self, id: TxnId, writes: Writes) -> Outcome {
        self.clock += 1;
        let timestamp = Timestamp(self.clock);
        for (key, value) in writes {
            self.data.insert(key, Read { value, version: Version { timestamp, writer: id } });
        }
        *self.applied.entry((id.client, id.counter)).or_default() += 1;
        self.end(id, Outcome::Committed(timestamp))
    }

    fn end(&mut self, id: TxnId, outcome: Outcome) -> Outcome {
        self.open.remove(&id);
        *self.ended.entry(id).or_insert(outcome)
    }

    fn decide(&mut self, id: TxnId, reads: &Reads, decision: Decision) -> Outcome {
        let holds = |(key, read): (&Key, &Read)| {
            self.data.get(key).map_or(Version::INITIAL, |now| now.version) == read.version
        };
        match decision {
            Decision::Abort => self.end(id, Outcome::Aborted(AbortReason::Client)),
            Decision::Commit(_) if !reads.iter().all(holds) => {
                self.end(id, Outcome::Aborted(AbortReason::StaleRead))
            }
            Decision::Commit(writes) => self.commit(id, writes),
        }
    }

    fn begin(&mut self, txn: Txn) -> Begun {
        let reads = self.read(&txn.reads);
        let finished = |outcome, reads| Begun::Finished(Finished { outcome, reads, path: "test" });
        match &txn.kind {
            Kind::Interactive | Kind::General => {
                self.open.insert(txn.id, (txn, reads.clone()));
                Begun::Reads(reads)
            }
            Kind::Procedure(ops) => match Txn::execute(ops, &reads) {
                Ok(writes) => finished(self.commit(txn.id, writes), Some(reads)),
                Err(reason) => finished(self.end(txn.id, Outcome::Aborted(reason)), None),
            },
            Kind::ReadOnly | Kind::StaleReadOnly => {
                finished(self.end(txn.id, Outcome::Committed(Timestamp(self.clock))), Some(reads))
            }
        }
    }

    /// Another round of a general transaction. It holds no locks, because its versions are compared
    /// at the end.
    fn read_on(&mut self, id: TxnId, keys: &[Key]) -> Result<Begun, GatewayError> {
        let now = self.read(keys);
        let Some((_, before)) = self.open.get_mut(&id) else {
            let outcome = self.ended.get(&id).copied();
            let finished = |outcome| Begun::Finished(finished(outcome));
            return outcome.map(finished).ok_or(GatewayError::UnknownTransaction(id));
        };
        for (key, read) in now {
            before.entry(key).or_insert(read);
        }
        let answer = before.iter().filter(|(key, _)| keys.contains(key));
        Ok(Begun::Reads(answer.map(|(key, read)| (key.clone(), read.clone())).collect()))
    }

    fn resolve(&mut self, txn: &Txn, reads: &Reads, decision: Option<Decision>) -> Outcome {
        if let Some(&outcome) = self.ended.get(&txn.id) {
            return outcome;
        }
        match decision {
            Some(decision) => self.decide(txn.id, reads, decision),
            None => self.end(txn.id, Outcome::Aborted(AbortReason::Recovery)),
        }
    }
}

impl Store {
    pub fn text(&self, key: &str) -> Option<String> {
        let read = self.state.lock().unwrap().data.get(&Key::from(key)).cloned();
        read.and_then(|read| read.value).map(|value| value.to_string())
    }

    pub fn open(&self) -> usize {
        self.state.lock().unwrap().open.len()
    }

    pub fn calls(&self, wanted: Call) -> Vec<TxnId> {
        let state = self.state.lock().unwrap();
        state.calls.iter().filter(|(call, _)| *call == wanted).map(|&(_, id)| id).collect()
    }

    pub fn acknowledged_below(&self) -> u64 {
        self.state.lock().unwrap().acknowledged_below
    }

    /// How often an attempt named another home than the first attempt of its transaction.
    pub fn moves(&self) -> u32 {
        self.state.lock().unwrap().moves
    }

    /// The largest number of times that one transaction was applied.
    pub fn applied_max(&self) -> u32 {
        self.state.lock().unwrap().applied.values().copied().max().unwrap_or(0)
    }
}

/// One gateway.
pub struct Node {
    pub store: Arc<Store>,
    pub address: String,
    cluster: String,
    number: u32,
    general: bool,
    twists: Mutex<OrdMap<Call, VecDeque<Twist>>>,
    proxy: watch::Sender<Proxy>,
}

/// The test's instructions to the proxy: how often it should have cut all connections so far, and
/// whether it accepts new ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Proxy {
    cuts: u32,
    open: bool,
}

impl Node {
    /// Starts gateway `number` in the region of the same number, in front of `store`.
    pub async fn start(store: &Arc<Store>, number: u16) -> Arc<Self> {
        Self::start_with(store, number, "test", Access::open(), Limits::default()).await
    }

    /// The same, with a protocol that runs no general transactions.
    pub async fn start_plain(store: &Arc<Store>, number: u16) -> Arc<Self> {
        Self::start_as(store, number, "test", false, Access::open(), Limits::default()).await
    }

    pub async fn start_with(
        store: &Arc<Store>,
        number: u16,
        cluster: &str,
        access: Access,
        limits: Limits,
    ) -> Arc<Self> {
        Self::start_as(store, number, cluster, true, access, limits).await
    }

    async fn start_as(
        store: &Arc<Store>,
        number: u16,
        cluster: &str,
        general: bool,
        access: Access,
        limits: Limits,
    ) -> Arc<Self> {
        let backend = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let front = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let node = Arc::new(Self {
            store: Arc::clone(store),
            address: front.local_addr().unwrap().to_string(),
            cluster: cluster.into(),
            number: number.into(),
            general,
            twists: Mutex::default(),
            proxy: watch::Sender::new(Proxy { cuts: 0, open: true }),
        });
        tokio::spawn(proxy(front, backend.local_addr().unwrap(), node.proxy.subscribe()));
        let config = ServiceConfig { access, tls: None, limits, audit: None };
        let served = service::serve(
            Arc::new(Handle(Arc::clone(&node))),
            Arc::new(map()),
            Listeners { clients: backend, redis: None },
            config,
            Box::pin(std::future::pending()),
        );
        tokio::spawn(async move { served.await.unwrap() });
        node
    }

    /// Scripts the next calls of this kind.
    pub fn twist(&self, call: Call, twists: impl IntoIterator<Item = Twist>) {
        self.twists.lock().unwrap().entry(call).or_default().extend(twists);
    }

    /// Removes one scripted call; false if none is left.
    pub fn untwist(&self, call: Call) -> bool {
        let mut twists = self.twists.lock().unwrap();
        twists.get_mut(&call).and_then(VecDeque::pop_front).is_some()
    }

    /// Cuts every connection, and accepts new ones.
    pub fn cut(&self) {
        self.proxy.send_modify(|proxy| proxy.cuts += 1);
    }

    /// Cuts every connection, and accepts none until [`Node::come_back`].
    pub fn go_away(&self) {
        self.proxy.send_modify(|proxy| *proxy = Proxy { cuts: proxy.cuts + 1, open: false });
    }

    pub fn come_back(&self) {
        self.proxy.send_modify(|proxy| proxy.open = true);
    }

    async fn call<T>(
        &self,
        call: Call,
        id: TxnId,
        act: impl FnOnce(&mut State) -> T,
        ended: impl FnOnce(Finished) -> T,
    ) -> Result<T, GatewayError> {
        let twist = self.twists.lock().unwrap().get_mut(&call).and_then(VecDeque::pop_front);
        {
            let mut state = self.store.state.lock().unwrap();
            state.calls.push((call, id));
            match twist.unwrap_or(Twist::Do) {
                Twist::Do => return Ok(act(&mut state)),
                Twist::Old => {
                    let data = std::mem::take(&mut state.data);
                    let done = act(&mut state);
                    state.data = data;
                    return Ok(done);
                }
                Twist::Busy => return Err(GatewayError::Overloaded { limit: 0 }),
                Twist::Stopping => return Err(GatewayError::Stopping),
                Twist::Unknown => return Ok(ended(finished(Outcome::Unknown))),
                Twist::Forgotten => {
                    let unknown = finished(Outcome::Unknown);
                    return Ok(ended(Finished { path: UNKNOWABLE, ..unknown }));
                }
                Twist::Abort(reason) => {
                    return Ok(ended(finished(state.end(id, Outcome::Aborted(reason)))));
                }
                Twist::DoAndCut => {
                    act(&mut state);
                    self.cut();
                }
                Twist::Cut => self.cut(),
                Twist::Hang => {}
            }
        }
        std::future::pending().await
    }
}

fn map() -> Cluster {
    let rtt = Duration::from_millis(50);
    let topology = Topology::uniform(3, Duration::from_micros(500), rtt);
    Cluster::spread(topology, 1, 1, 3, 3).unwrap()
}

/// The service's handle to a node.
struct Handle(Arc<Node>);

fn finished(outcome: Outcome) -> Finished {
    Finished { outcome, reads: None, path: "test" }
}

#[tonic::async_trait]
impl Transactions for Handle {
    async fn register(&self) -> Result<ClientId, GatewayError> {
        let mut state = self.0.store.state.lock().unwrap();
        state.clients += 1;
        Ok(ClientId(state.clients))
    }

    async fn begin(&self, txn: Txn) -> Result<Begun, GatewayError> {
        let id = txn.id;
        {
            let mut state = self.0.store.state.lock().unwrap();
            state.acknowledged_below = txn.acknowledged_below;
            let first = *state.homes.entry((id.client, id.counter)).or_insert(txn.home);
            state.moves += u32::from(first != txn.home);
        }
        let begin = |state: &mut State| state.begin(txn);
        self.0.call(Call::Begin, id, begin, Begun::Finished).await
    }

    async fn read(&self, id: TxnId, keys: Vec<Key>) -> Result<Begun, GatewayError> {
        let read = |state: &mut State| state.read_on(id, &keys);
        self.0.call(Call::Read, id, read, |ended| Ok(Begun::Finished(ended))).await?
    }

    async fn decide(&self, id: TxnId, decision: Decision) -> Result<Finished, GatewayError> {
        let decide = |state: &mut State| match state.open.get(&id).cloned() {
            Some((_, reads)) => Ok(finished(state.decide(id, &reads, decision))),
            None => Err(GatewayError::UnknownTransaction(id)),
        };
        self.0.call(Call::Decide, id, decide, Ok).await?
    }

    async fn resolve(
        &self,
        txn: Txn,
        reads: Reads,
        decision: Option<Decision>,
    ) -> Result<Finished, GatewayError> {
        let resolve = |state: &mut State| finished(state.resolve(&txn, &reads, decision));
        self.0.call(Call::Resolve, txn.id, resolve, |ended| ended).await
    }

    async fn admin(&self, _order: Admin) -> Result<(), OrderError> {
        let (leader, node) = (*self.0.store.leader.lock().unwrap(), self.describe().node);
        let stale = self.0.store.stale.lock().unwrap().get(&node).copied();
        let leader = NodeId(stale.unwrap_or(leader));
        if leader == node {
            return Ok(());
        }
        let leader = (leader != NodeId(0)).then_some(leader);
        Err(OrderError::Refused(Refusal::NotLeader(leader)))
    }

    async fn groups(&self) -> Vec<GroupView> {
        Vec::new()
    }

    fn describe(&self) -> Description {
        Description {
            cluster: self.0.cluster.clone(),
            protocol: "test",
            guarantee: "strict serializability",
            general: self.0.general,
            node: NodeId(self.0.number + 1),
            gateway: NodeId(self.0.number + 4),
            region: format!("R{}", self.0.number),
            leaders: OrdMap::new(),
            health: Health::Serving,
            in_flight: 0,
            in_flight_max: 1,
        }
    }

    async fn pending(&self) -> Option<PendingTxns> {
        None
    }

    async fn orders(&self) -> Vec<(MembershipOrder, Duration)> {
        Vec::new()
    }

    fn links(&self) -> Vec<LinkStatus> {
        Vec::new()
    }

    async fn gauges(&self) -> Vec<Gauge> {
        Vec::new()
    }
}

async fn proxy(front: TcpListener, back: SocketAddr, orders: watch::Receiver<Proxy>) {
    loop {
        let (client, _) = front.accept().await.unwrap();
        let mut orders = orders.clone();
        let before = *orders.borrow_and_update();
        if !before.open {
            continue;
        }
        tokio::spawn(async move {
            let mut client: TcpStream = client;
            let mut server = TcpStream::connect(back).await.unwrap();
            tokio::select! {
                _ = tokio::io::copy_bidirectional(&mut client, &mut server) => {}
                _ = orders.wait_for(|now| now.cuts != before.cuts) => {}
            }
        });
    }
}
