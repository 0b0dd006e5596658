//! `tpcc`: TPC Benchmark C, revision 5.11: all five transactions and the standard mix.
//! [`orthodrome_core::procedure::tpcc`] has the rows, NewOrder and Payment.
//!
//! All data of a warehouse lies in one partition. Warehouses are numbered so that each region that
//! leads partitions has the same number. Clients use the warehouses of their region, each equally
//! likely; the specification ties a terminal to one. There is no keying time and no think time.
//!
//! NewOrder and Payment are procedures, whose keys are known beforehand. Names never change, so the
//! customers with a given last name are known too, and Payment reads all of them. The other
//! transactions find their keys by reading, and are general transactions.
//!
//! The conditions of clause 3.3.2 are checked on the reads of each committed transaction, as far as
//! they suffice. At the end of a run they are checked on every row of a few warehouses that any
//! transaction may have changed.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::procedure::{Call, Procedure, row, tpcc as rows};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Reads, Value, Writes};

use super::options::{Priorities, bounded, share};
use super::places::Places;
use super::spread::{chance, weighted};
use super::tpcc_check::State;
use super::{Issuer, Options, Request, Step, Values, Workload, WorkloadError};

const NEW_ORDER: &str = "new-order";
const PAYMENT: &str = "payment";
const ORDER_STATUS: &str = "order-status";
const DELIVERY: &str = "delivery";
const STOCK_LEVEL: &str = "stock-level";
const NAMES: [&str; 5] = [NEW_ORDER, PAYMENT, ORDER_STATUS, DELIVERY, STOCK_LEVEL];
const CHECK: &str = "check";

/// The transactions besides NewOrder, with their shares in per cent (clause 5.2.3).
const OTHERS: [(u64, &str); 4] =
    [(43, PAYMENT), (4, ORDER_STATUS), (4, DELIVERY), (4, STOCK_LEVEL)];

/// NewOrder's share in the standard mix.
const NEW_ORDERS: f64 = 0.45;

/// The number of warehouses all of whose rows are read at the end of a run.
const CHECKED: usize = 4;

/// Of this many items, one has its stock checked at the end.
const CHECKED_ITEMS: i64 = 16;

/// `C` of NURand for `C_LAST`, `C_ID` and `OL_I_ID` (clause 2.1.6): the first is the difference to
/// the one that the database is populated with, from 65 to 119.
const C: [i64; 3] = [87, 259, 7_911];

/// The workload.
#[derive(Debug)]
pub struct Tpcc {
    /// If present, all transactions are of this kind.
    only: Option<&'static str>,
    warehouses: i64,
    places: Places,
    new_orders: f64,
    multi_warehouse: Option<f64>,
    multi_region: Option<f64>,
    distributed: Option<f64>,
    rollbacks: f64,
    priorities: Priorities,
    /// The last number given to an order, a payment or a delivery.
    number: i64,
    tracked: Tracked,
}

/// What the checked warehouses may hold, according to the requests.
#[derive(Debug, Default)]
struct Tracked {
    warehouses: OrdSet<i64>,
    /// Warehouse, district, number and customer of orders at the checked warehouses, and of orders
    /// at other warehouses that take from their stock.
    orders: Vec<(i64, i64, i64, i64)>,
    /// Warehouse and number of payments to the checked warehouses, and of payments to others by
    /// their customers.
    payments: Vec<(i64, i64)>,
    customers: OrdSet<(i64, i64, i64)>,
    stocks: OrdSet<(i64, i64)>,
    /// The number of deliveries requested for each warehouse.
    deliveries: OrdMap<i64, i64>,
}

impl Tpcc {
    /// `warehouses` (16) in each region. A share `new_order_share` (0.45, or 1 with the parameter
    /// `new-order`) is NewOrder. A share `rollbacks` (0.01) of the orders asks for an item that
    /// does not exist. Each order line is of another warehouse with a probability of 1 %; if
    /// `multi_warehouse` is given, instead exactly one line of this share of the orders is. 15 % of
    /// the payments are by customers of another warehouse. The other warehouse is any; if
    /// `multi_region` is given, it is in another region in this share of the cases. With the
    /// parameter `payment` all transactions are Payment.
    ///
    /// If `distributed` is given, the warehouses are those of any region, whichever region the
    /// client is in. This share of the orders has one line of a warehouse in another region, and
    /// this share of the payments has its customer there. The others stay in one region.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(parameter: Option<&str>, options: &Options) -> Result<Self, WorkloadError> {
        let known = [
            "warehouses",
            "new_order_share",
            "multi_warehouse",
            "multi_region",
            "distributed",
            "rollbacks",
        ];
        options.only("tpcc", &known)?;
        let (only, new_orders) = match parameter {
            None => (None, NEW_ORDERS),
            Some(NEW_ORDER) => (Some(NEW_ORDER), 1.0),
            Some(PAYMENT) => (Some(PAYMENT), 0.0),
            Some(other) => {
                return Err(WorkloadError::Parameter {
                    spec: format!("tpcc:{other}"),
                    problem: format!("tpcc has no variant {other:?}"),
                    remedy: "use \"tpcc\", \"tpcc:new-order\" or \"tpcc:payment\"".into(),
                });
            }
        };
        let contradicted = [
            ("multi_warehouse", options.multi_warehouse.is_some()),
            ("multi_region", options.multi_region.is_some()),
        ];
        if let (Some((field, _)), true) =
            (contradicted.into_iter().find(|(_, is)| *is), options.distributed.is_some())
        {
            return Err(WorkloadError::Option {
                field,
                problem: "conflicts with `distributed`".into(),
                remedy: "remove one of the two".into(),
            });
        }
        if only == Some(PAYMENT) && options.new_order_share.is_some() {
            return Err(WorkloadError::Option {
                field: "new_order_share",
                problem: "conflicts with `tpcc:payment`".into(),
                remedy: "remove it, or use \"tpcc\"".into(),
            });
        }
        let new_orders = share("new_order_share", options.new_order_share, new_orders)?;
        let optional = |field, value: Option<f64>| match value {
            None => Ok(None),
            Some(_) => share(field, value, 0.0).map(Some),
        };
        let warehouses = bounded("warehouses", options.warehouses, 16, (1, 10_000))?;
        let warehouses = i64::try_from(warehouses).unwrap_or(i64::MAX);
        let mut workload = Self {
            only: only.or((new_orders >= 1.0).then_some(NEW_ORDER)),
            warehouses,
            places: Places::alone(warehouses),
            new_orders,
            multi_warehouse: optional("multi_warehouse", options.multi_warehouse)?,
            multi_region: optional("multi_region", options.multi_region)?,
            distributed: optional("distributed", options.distributed)?,
            rollbacks: share("rollbacks", options.rollbacks, 0.01)?,
            priorities: options.priorities(&NAMES)?,
            number: rows::INITIAL_ORDERS,
            tracked: Tracked::default(),
        };
        workload.track();
        Ok(workload)
    }

    /// Chooses the warehouses to check: the first of each region, then the second of each.
    fn track(&mut self) {
        let most = self.places.all().map(<[i64]>::len).max().unwrap_or_default();
        let in_turn = (0..most).flat_map(|at| self.places.all().filter_map(move |all| all.get(at)));
        let warehouses = in_turn.take(CHECKED).copied().collect();
        self.tracked = Tracked { warehouses, ..Tracked::default() };
    }

    fn next_number(&mut self) -> i64 {
        self.number += 1;
        self.number
    }

    /// Another warehouse than `w`, if there is one.
    fn other_warehouse(&self, home: usize, w: i64, rng: &mut Rng) -> i64 {
        let nearby = self.places.names(home);
        let is_abroad = match (self.distributed, self.multi_region) {
            // A transaction over two regions is drawn as a whole, not line by line.
            (Some(_), _) => false,
            (None, Some(share)) => chance(share, rng),
            (None, None) => {
                let all: usize = self.places.all().map(<[i64]>::len).sum();
                let abroad = (all - nearby.len()) as u64;
                rng.below((all as u64).saturating_sub(1)) < abroad
            }
        };
        let has_others = nearby.len() > 1 || self.distributed.is_some();
        let place = if is_abroad || !has_others { self.places.other(home, rng) } else { home };
        if place != home {
            return self.places.pick(place, rng);
        }
        if nearby.len() < 2 {
            return w;
        }
        let at = nearby.iter().position(|name| *name == w).unwrap_or_default();
        let step = 1 + rng.below((nearby.len() as u64).saturating_sub(1));
        let other = (at as u64 + step).checked_rem(nearby.len() as u64).unwrap_or_default();
        usize::try_from(other).ok().and_then(|at| nearby.get(at)).copied().unwrap_or(w)
    }

    /// A warehouse of another region, if this transaction should have one.
    fn warehouse_abroad(&self, home: usize, rng: &mut Rng) -> Option<i64> {
        let is_abroad = self.distributed.is_some_and(|share| chance(share, rng));
        is_abroad.then(|| self.places.pick(self.places.other(home, rng), rng))
    }

    fn new_order(&mut self, home: usize, w: i64, d: i64, rng: &mut Rng) -> Request {
        let c = nurand(1_023, C[1], (1, rows::CUSTOMERS), rng);
        let count = rng.range(5, 15);
        let is_rolled_back = chance(self.rollbacks, rng);
        let remote_line = match self.multi_warehouse {
            Some(share) if chance(share, rng) => Some(rng.below(count)),
            Some(_) | None => None,
        };
        let abroad = self.warehouse_abroad(home, rng).map(|abroad| (rng.below(count), abroad));
        let mut lines: Vec<[i64; 3]> = Vec::new();
        for number in 0..count {
            let is_remote = match self.multi_warehouse {
                Some(_) => remote_line == Some(number),
                None => rng.chance(1, 100),
            };
            let supply = match abroad {
                Some((line, abroad)) if line == number => abroad,
                Some(_) | None if is_remote => self.other_warehouse(home, w, rng),
                Some(_) | None => w,
            };
            // No item twice: each line takes from a different stock.
            let mut item = nurand(8_191, C[2], (1, rows::ITEMS), rng);
            while lines.iter().any(|line| line[0] == item) {
                item = item % rows::ITEMS + 1;
            }
            if is_rolled_back && number + 1 == count {
                item = rows::ITEMS + 1;
            }
            lines.push([item, supply, rng.range(1, 10).cast_signed()]);
        }
        let number = self.next_number();
        self.track_order((w, d, number, c), &lines);
        let stocks: Vec<Key> = lines.iter().map(|line| rows::stock_key(line[1], line[0])).collect();
        let (district, queue) = (rows::district_key(w, d), rows::queue_key(w, d));
        let fixed = [rows::warehouse_key(w), district.clone(), queue.clone()];
        let fixed = fixed.into_iter().chain([rows::customer_key(w, d, c)]);
        let reads = fixed.chain(stocks.iter().cloned()).collect();
        let orders = [rows::order_key(w, d, number), rows::last_order_key(w, d, c)];
        let writes = [district, queue].into_iter().chain(orders).chain(stocks).collect();
        let head = [w, d, c, number];
        let lines = lines.iter().map(<[i64; 3]>::as_slice);
        let arguments = row::format(std::iter::once(head.as_slice()).chain(lines));
        let call = Call { procedure: Procedure::TpccNewOrder, reads, writes, arguments };
        self.called(NEW_ORDER, call, number, rng)
    }

    fn track_order(&mut self, order: (i64, i64, i64, i64), lines: &[[i64; 3]]) {
        let (w, d, _, c) = order;
        let tracked = &mut self.tracked;
        let is_own = tracked.warehouses.contains(&w);
        let mut takes = false;
        for &[item, supply, _] in lines {
            if tracked.warehouses.contains(&supply) && item % CHECKED_ITEMS == 0 {
                tracked.stocks.insert((supply, item));
                takes = true;
            }
        }
        if is_own {
            tracked.customers.insert((w, d, c));
        }
        if is_own || takes {
            tracked.orders.push(order);
        }
    }

    fn payment(&mut self, home: usize, w: i64, d: i64, rng: &mut Rng) -> Request {
        let (cw, cd) = if let Some(abroad) = self.warehouse_abroad(home, rng) {
            (abroad, rng.range(1, 10).cast_signed())
        } else if rng.chance(85, 100) {
            (w, d)
        } else {
            (self.other_warehouse(home, w, rng), rng.range(1, 10).cast_signed())
        };
        let (c, named) = customer(cw, cd, rng);
        let amount = rng.range(100, 500_000).cast_signed();
        let number = self.next_number();
        let tracked = &mut self.tracked;
        let is_ours = tracked.warehouses.contains(&cw);
        if is_ours {
            tracked.customers.insert((cw, cd, c));
        }
        if is_ours || tracked.warehouses.contains(&w) {
            tracked.payments.push((w, number));
        }
        let places = [rows::warehouse_key(w), rows::district_key(w, d)];
        let customers = named.iter().map(|&c| rows::customer_key(cw, cd, c));
        let reads = places.iter().cloned().chain(customers).collect();
        let booked = [rows::customer_key(cw, cd, c), rows::history_key(w, number)];
        let writes = places.into_iter().chain(booked).collect();
        let head = [w, d, cw, cd, c, amount, number];
        let arguments = row::format([head.as_slice(), named.as_slice()]);
        let call = Call { procedure: Procedure::TpccPayment, reads, writes, arguments };
        self.called(PAYMENT, call, number, rng)
    }

    fn called(&self, name: &'static str, call: Call, number: i64, rng: &mut Rng) -> Request {
        Request {
            name,
            reads: call.reads.clone(),
            writes: call.writes.clone(),
            kind: Kind::Procedure(vec![Op::Call(call)]),
            priority: self.priorities.draw(name, rng),
            parameter: number.cast_unsigned(),
            scan: None,
        }
    }

    fn general(
        &self,
        name: &'static str,
        reads: Vec<Key>,
        writes: Vec<Key>,
        parameter: u64,
        rng: &mut Rng,
    ) -> Request {
        let priority = self.priorities.draw(name, rng);
        Request { name, kind: Kind::General, reads, writes, priority, parameter, scan: None }
    }

    fn delivery(&mut self, w: i64, rng: &mut Rng) -> Request {
        let carrier = rng.range(1, 10);
        // The number serves as the date of the delivery.
        let number = self.next_number();
        if self.tracked.warehouses.contains(&w) {
            *self.tracked.deliveries.entry(w).or_default() += 1;
        }
        let queues: Vec<Key> = (1..=rows::DISTRICTS).map(|d| rows::queue_key(w, d)).collect();
        let parameter = number.cast_unsigned() * 16 + carrier;
        self.general(DELIVERY, queues.clone(), queues, parameter, rng)
    }

    /// All rows that the checked warehouses may have, except rows that were populated and never
    /// change.
    fn check_keys(&self) -> OrdSet<Key> {
        let tracked = &self.tracked;
        let mut keys = OrdSet::new();
        let mut customers = tracked.customers.clone();
        for &w in &tracked.warehouses {
            keys.insert(rows::warehouse_key(w));
            for d in 1..=rows::DISTRICTS {
                keys.insert(rows::district_key(w, d));
                keys.insert(rows::queue_key(w, d));
                // A customer whose order is delivered may have an initial order.
                let deliveries = tracked.deliveries.get(&w).copied().unwrap_or_default();
                let first = rows::INITIAL_DELIVERED + 1;
                for number in first..(first + deliveries).min(rows::INITIAL_ORDERS + 1) {
                    keys.insert(rows::order_key(w, d, number));
                    let order = rows::Order::parse(None, w, d, number);
                    customers.extend(order.map(|order| (w, d, order.customer)));
                }
            }
        }
        for &(w, d, number, _) in &tracked.orders {
            keys.insert(rows::order_key(w, d, number));
        }
        for (w, d, c) in customers {
            keys.insert(rows::customer_key(w, d, c));
            keys.insert(rows::last_order_key(w, d, c));
        }
        keys.extend(tracked.payments.iter().map(|&(w, number)| rows::history_key(w, number)));
        keys.extend(tracked.stocks.iter().map(|&(w, item)| rows::stock_key(w, item)));
        keys
    }
}

/// A number from `low` to `high`, unevenly distributed (clause 2.1.6).
fn nurand(a: u64, c: i64, (low, high): (i64, i64), rng: &mut Rng) -> i64 {
    let mixed = rng.below(a + 1) | rng.range(low.cast_unsigned(), high.cast_unsigned());
    (mixed.cast_signed() + c) % (high - low + 1) + low
}

/// A customer of a district, and the customers to read in order to find it: 60 % are identified by
/// their last name.
fn customer(w: i64, d: i64, rng: &mut Rng) -> (i64, Vec<i64>) {
    if rng.chance(60, 100) {
        let name = nurand(255, C[0], (0, rows::NAMES - 1), rng);
        let named = rows::customers_named(w, d, name);
        if let Some(c) = rows::middle(w, d, named.clone()) {
            return (c, named);
        }
    }
    let c = nurand(1_023, C[1], (1, rows::CUSTOMERS), rng);
    (c, vec![c])
}

/// The value read of a key; none if the key was not read.
fn value<'a>(reads: &'a Reads, key: &Key) -> Option<Option<&'a Value>> {
    reads.get(key).map(|read| read.value.as_ref())
}

/// The next round, if some of these keys are not read yet.
fn round(keys: OrdSet<Key>, reads: &Reads) -> Option<Step> {
    let unread: Vec<Key> = keys.into_iter().filter(|key| !reads.contains_key(key)).collect();
    (!unread.is_empty()).then_some(Step::Read(unread))
}

/// The orders that the queues among the keys name as the oldest: district, number, and the queue.
fn oldest(request: &Request, reads: &Reads) -> Option<Vec<(i64, i64, i64, rows::Queue)>> {
    let mut all = Vec::new();
    for key in &request.reads {
        let &[w, d] = rows::key_numbers(key)?.as_slice() else { return None };
        let queue = rows::Queue::parse(value(reads, key)?)?;
        if let Some((_, number)) = queue.oldest() {
            all.push((w, d, number, queue));
        }
    }
    Some(all)
}

/// Delivery (clause 2.7): the oldest order of each district of a warehouse, in one transaction.
/// None if the rows contradict each other.
fn step_delivery(request: &Request, reads: &Reads) -> Option<Step> {
    let oldest = oldest(request, reads)?;
    let keys = oldest.iter().map(|&(w, d, number, _)| rows::order_key(w, d, number)).collect();
    if let Some(next) = round(keys, reads) {
        return Some(next);
    }
    let mut orders = Vec::new();
    for (w, d, number, queue) in oldest {
        let key = rows::order_key(w, d, number);
        let order = rows::Order::parse(value(reads, &key)?, w, d, number)?;
        orders.push((key, (w, d), order, queue));
    }
    let customer_of =
        |(w, d): (i64, i64), order: &rows::Order| rows::customer_key(w, d, order.customer);
    let keys = orders.iter().map(|(_, at, order, _)| customer_of(*at, order)).collect();
    if let Some(next) = round(keys, reads) {
        return Some(next);
    }
    let (date, carrier) = (request.parameter / 16, request.parameter % 16);
    let mut writes = Writes::new();
    for (key, at, mut order, mut queue) in orders {
        let customer_key = customer_of(at, &order);
        let mut customer = rows::Customer::parse(value(reads, &customer_key)?)?;
        customer.balance = customer.balance.checked_add(order.amount())?;
        customer.deliveries += 1;
        order.carrier = carrier.cast_signed();
        for line in &mut order.lines {
            line.delivered = date.cast_signed();
        }
        queue.pop();
        writes.insert(key, Some(order.value()));
        writes.insert(customer_key, Some(customer.value()));
        writes.insert(rows::queue_key(at.0, at.1), Some(queue.value()));
    }
    Some(Step::Decide(Decision::Commit(writes)))
}

/// OrderStatus (clause 2.6): a customer's last order.
fn step_order_status(request: &Request, reads: &Reads) -> Option<Step> {
    let key = request.reads.iter().find(|key| key.bytes().starts_with(b"last-order"))?;
    let &[w, d, c] = rows::key_numbers(key)?.as_slice() else { return None };
    let number = rows::last_order(value(reads, key)?, w, d, c)?;
    let next = round([rows::order_key(w, d, number)].into(), reads);
    Some(next.unwrap_or(Step::Decide(Decision::Commit(Writes::new()))))
}

/// StockLevel (clause 2.8): the stock of the items of a district's last orders.
fn step_stock_level(request: &Request, reads: &Reads) -> Option<Step> {
    let key = request.reads.first()?;
    let &[w, d] = rows::key_numbers(key)?.as_slice() else { return None };
    let numbers = rows::District::parse(value(reads, key)?)?.last_orders();
    let keys = numbers.iter().map(|&number| rows::order_key(w, d, number)).collect();
    if let Some(next) = round(keys, reads) {
        return Some(next);
    }
    let mut stocks = OrdSet::new();
    for number in numbers {
        let read = value(reads, &rows::order_key(w, d, number))?;
        let order = rows::Order::parse(read, w, d, number)?;
        stocks.extend(order.lines.iter().map(|line| rows::stock_key(w, line.item)));
    }
    Some(round(stocks, reads).unwrap_or(Step::Decide(Decision::Commit(Writes::new()))))
}

impl Workload for Tpcc {
    fn name(&self) -> String {
        self.only.map_or_else(|| "tpcc".into(), |only| format!("tpcc:{only}"))
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn place(&mut self, cluster: &Cluster) {
        self.places = Places::of(cluster, self.warehouses);
        self.track();
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let home = match self.distributed {
            Some(_) => {
                let count = self.places.all().count() as u64;
                usize::try_from(rng.below(count)).unwrap_or_default()
            }
            None => self.places.home(issuer.region),
        };
        let w = self.places.pick(home, rng);
        let d = rng.range(1, 10).cast_signed();
        if chance(self.new_orders, rng) {
            return self.new_order(home, w, d, rng);
        }
        match self.only.or_else(|| weighted(&OTHERS, rng).copied()) {
            Some(PAYMENT) => self.payment(home, w, d, rng),
            Some(DELIVERY) => self.delivery(w, rng),
            Some(STOCK_LEVEL) => {
                let threshold = rng.range(10, 20);
                let reads = vec![rows::district_key(w, d)];
                self.general(STOCK_LEVEL, reads, Vec::new(), threshold, rng)
            }
            Some(_) | None => {
                let (c, named) = customer(w, d, rng);
                let customers = named.iter().map(|&c| rows::customer_key(w, d, c));
                let reads = customers.chain([rows::last_order_key(w, d, c)]).collect();
                self.general(ORDER_STATUS, reads, Vec::new(), 0, rng)
            }
        }
    }

    fn decide(&self, _: &Request, _: &Reads) -> Decision {
        // This workload has no interactive transactions.
        Decision::Abort
    }

    fn step(&self, request: &Request, reads: &Reads) -> Step {
        if let Some(first) = round(request.reads.iter().cloned().collect(), reads) {
            return first;
        }
        let step = match request.name {
            DELIVERY => step_delivery(request, reads),
            ORDER_STATUS => step_order_status(request, reads),
            STOCK_LEVEL => step_stock_level(request, reads),
            _ => None,
        };
        // Rows that were read ahead may contradict each other. If those of a transaction do, its
        // audit or the final audit reports it.
        step.unwrap_or(Step::Decide(Decision::Abort))
    }

    fn is_general(&self) -> bool {
        self.only.is_none()
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        if request.name == CHECK {
            return Ok(());
        }
        State::of(reads)?.audit()
    }

    fn final_requests(&self) -> Vec<Request> {
        let keys: Vec<Key> = self.check_keys().into_iter().collect();
        Request::checks(CHECK, &keys)
    }

    fn audit_end(&self, reads: &Reads) -> Result<(), String> {
        let state = State::of(reads)?;
        state.audit()?;
        self.tracked.warehouses.iter().try_for_each(|&w| state.audit_warehouse(w))?;
        self.tracked.stocks.iter().try_for_each(|&(w, item)| state.audit_stock(w, item))
    }
}
