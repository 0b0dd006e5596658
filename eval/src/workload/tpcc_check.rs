//! TPC-C's consistency conditions (clause 3.3.2), on any rows that were read together.
//!
//! [`State::audit`] checks what any rows show by themselves: conditions 1 to 3 where their rows are
//! present, and conditions 6 and 7 of every order. [`State::audit_warehouse`] checks conditions 1
//! to 12 of a warehouse all of whose changed rows are present. [`State::audit_stock`] does the same
//! for a stock, which the specification does not mention.

use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::procedure::tpcc::{
    Customer, DISTRICT_YTD, DISTRICTS, District, History, INITIAL_DELIVERED, INITIAL_ORDERS,
    INITIAL_PAID, Order, Queue, Stock, WAREHOUSE_YTD, Warehouse, key_numbers, last_order,
};
use orthodrome_core::txn::{Key, Reads, Value};

/// Warehouse and district.
type InDistrict = (i64, i64);
/// Warehouse, district, and number within it.
type Row = (i64, i64, i64);

/// Rows by table.
#[derive(Debug, Default)]
pub(super) struct State {
    warehouses: OrdMap<i64, Warehouse>,
    districts: OrdMap<InDistrict, District>,
    queues: OrdMap<InDistrict, Queue>,
    customers: OrdMap<Row, Customer>,
    /// Numbers of last orders.
    last: OrdMap<Row, i64>,
    /// Orders by warehouse, district and number. Orders that nobody placed are left out.
    orders: OrdMap<Row, Order>,
    histories: OrdMap<(i64, i64), History>,
    stocks: OrdMap<(i64, i64), Stock>,
}

/// Returns an error if two figures differ that must agree.
fn same(condition: &str, place: &str, found: i64, expected: i64) -> Result<(), String> {
    if found == expected {
        return Ok(());
    }
    Err(format!("TPC-C {condition} does not hold for {place}: {found} is not {expected}"))
}

fn total(numbers: impl Iterator<Item = i64>) -> i64 {
    numbers.fold(0, i64::saturating_add)
}

impl State {
    /// Collects the rows from what was read.
    ///
    /// # Errors
    /// If a value is not a row of its table.
    pub fn of(reads: &Reads) -> Result<Self, String> {
        let mut state = Self::default();
        for (key, read) in reads {
            let value = read.value.as_ref();
            if state.insert(key, value).is_none() {
                return Err(format!("{key} holds {value:?}, which is not a row of its table"));
            }
        }
        Ok(state)
    }

    fn insert(&mut self, key: &Key, value: Option<&Value>) -> Option<()> {
        let table = key.bytes().split(|byte| *byte == b'{').next()?;
        match (table, key_numbers(key)?.as_slice()) {
            (b"warehouse", &[w]) => drop(self.warehouses.insert(w, Warehouse::parse(value)?)),
            (b"district", &[w, d]) => {
                self.districts.insert((w, d), District::parse(value)?);
            }
            (b"new-order", &[w, d]) => drop(self.queues.insert((w, d), Queue::parse(value)?)),
            (b"customer", &[w, d, c]) => {
                self.customers.insert((w, d, c), Customer::parse(value)?);
            }
            (b"last-order", &[w, d, c]) => {
                self.last.insert((w, d, c), last_order(value, w, d, c)?);
            }
            (b"order", &[w, d, number]) => match (value, Order::parse(value, w, d, number)) {
                (_, Some(order)) => drop(self.orders.insert((w, d, number), order)),
                (None, None) => {}
                (Some(_), None) => return None,
            },
            (b"history", &[w, number]) => {
                if let Some(value) = value {
                    self.histories.insert((w, number), History::parse(value)?);
                }
            }
            (b"stock", &[w, item]) => {
                self.stocks.insert((w, item), Stock::parse(value, w, item)?);
            }
            _ => return None,
        }
        Some(())
    }

    /// Checks the invariants of the rows that are present.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub fn audit(&self) -> Result<(), String> {
        for (&w, warehouse) in &self.warehouses {
            let districts: Vec<&District> =
                (1..=DISTRICTS).filter_map(|d| self.districts.get(&(w, d))).collect();
            if districts.len() as i64 == DISTRICTS {
                let sum = total(districts.iter().map(|district| district.ytd));
                same("condition 1", &format!("warehouse {w}"), warehouse.ytd, sum)?;
            }
        }
        for (&(w, d), queue) in &self.queues {
            self.audit_queue(w, d, queue)?;
        }
        for (&(w, d, number), order) in &self.orders {
            let place = format!("order {number} of district {d} of warehouse {w}");
            same("condition 6", &place, order.count, order.lines.len() as i64)?;
            let is_delivered = order.carrier != 0;
            if order.lines.iter().any(|line| (line.delivered != 0) != is_delivered) {
                return Err(format!(
                    "TPC-C condition 7 does not hold for {place}: its carrier is {}, its lines are \
                     {:?}",
                    order.carrier, order.lines
                ));
            }
        }
        for (&(w, item), stock) in &self.stocks {
            if !(10..=100).contains(&stock.quantity) {
                return Err(format!(
                    "warehouse {w} has {} of item {item}; it fills up to between 10 and 100",
                    stock.quantity
                ));
            }
        }
        Ok(())
    }

    /// Conditions 2 and 3: the numbers of undelivered orders have no gap, up to the last one.
    fn audit_queue(&self, w: i64, d: i64, queue: &Queue) -> Result<(), String> {
        let place = format!("district {d} of warehouse {w}");
        let first = queue.orders.front().map_or(INITIAL_ORDERS + 1, |(id, _)| *id);
        let is_initial = queue.initial <= INITIAL_ORDERS;
        let is_gapless =
            queue.orders.iter().zip(first..).all(|((id, _), expected)| *id == expected);
        if !is_gapless || (is_initial && first != INITIAL_ORDERS + 1) {
            return Err(format!(
                "TPC-C condition 3 does not hold for {place}: from {}, then {:?} are not delivered",
                queue.initial, queue.orders
            ));
        }
        let last = queue.orders.back().map(|(id, _)| *id);
        let last = last.or(is_initial.then_some(INITIAL_ORDERS));
        match (self.districts.get(&(w, d)), last) {
            (Some(district), Some(last)) => same("condition 2", &place, last, district.next - 1),
            (Some(_) | None, _) => Ok(()),
        }
    }

    /// Conditions 1 to 12 of a warehouse.
    ///
    /// # Errors
    /// If a condition does not hold.
    pub fn audit_warehouse(&self, w: i64) -> Result<(), String> {
        let place = format!("warehouse {w}");
        let missing = || format!("{place} was not read");
        let warehouse = self.warehouses.get(&w).ok_or_else(missing)?;
        let paid = |d: Option<i64>| {
            let to =
                self.histories.range((w, i64::MIN)..=(w, i64::MAX)).map(|(_, history)| history);
            total(to.filter(|one| d.is_none_or(|d| one.district == d)).map(|one| one.amount))
        };
        let sum = (1..=DISTRICTS).map(|d| self.districts.get(&(w, d)).map(|district| district.ytd));
        let sum = sum.sum::<Option<i64>>().ok_or_else(missing)?;
        same("condition 1", &place, warehouse.ytd, sum)?;
        same("condition 8", &place, warehouse.ytd, WAREHOUSE_YTD.saturating_add(paid(None)))?;
        for d in 1..=DISTRICTS {
            let place = format!("district {d} of {place}");
            let district = self.districts.get(&(w, d)).ok_or_else(missing)?;
            same("condition 9", &place, district.ytd, DISTRICT_YTD.saturating_add(paid(Some(d))))?;
            self.audit_orders(w, d, district, &place)?;
        }
        Ok(())
    }

    /// Conditions 2 to 7 and 10 to 12 of a district.
    fn audit_orders(&self, w: i64, d: i64, district: &District, place: &str) -> Result<(), String> {
        let queue = self.queues.get(&(w, d)).ok_or_else(|| format!("{place} was not read"))?;
        let orders = || self.orders.range((w, d, i64::MIN)..=(w, d, i64::MAX));
        let placed: OrdMap<i64, (i64, &Order)> = orders()
            .filter(|((.., number), _)| *number > INITIAL_ORDERS)
            .map(|((.., number), order)| (order.id, (*number, order)))
            .collect();
        let count = orders().filter(|((.., number), _)| *number > INITIAL_ORDERS).count() as i64;
        let newest = placed.keys().next_back().copied().unwrap_or(INITIAL_ORDERS);
        same("condition 2", place, newest, district.next - 1)?;
        // Each number once, without gaps.
        same("condition 2", place, placed.len() as i64, count)?;
        same("condition 2", place, count, district.next - 1 - INITIAL_ORDERS)?;
        let all = || orders().map(|(_, order)| order);
        let lines = total(all().map(|order| order.lines.len() as i64));
        same("condition 4", place, total(all().map(|order| order.count)), lines)?;
        let waiting: OrdSet<i64> = queue.orders.iter().map(|(_, number)| *number).collect();
        for ((.., number), order) in orders() {
            let is_waiting =
                waiting.contains(number) || (queue.initial..=INITIAL_ORDERS).contains(number);
            if is_waiting != (order.carrier == 0) {
                return Err(format!(
                    "TPC-C condition 5 does not hold for order {number} of {place}: its carrier is \
                     {}, and it is {} be delivered",
                    order.carrier,
                    if is_waiting { "still to" } else { "not to" }
                ));
            }
        }
        if let Some(number) =
            waiting.iter().find(|&&number| !self.orders.contains_key(&(w, d, number)))
        {
            return Err(format!(
                "TPC-C condition 5 does not hold for {place}: order {number} is to be delivered, and \
                 nobody placed it"
            ));
        }
        let recent: Vec<i64> =
            placed.values().rev().take(district.recent.len()).map(|one| one.0).collect();
        if !recent.iter().eq(district.recent.iter().rev()) {
            return Err(format!("{place} names {:?} as its last orders", district.recent));
        }
        let customers = || self.customers.range((w, d, i64::MIN)..=(w, d, i64::MAX));
        let delivered = total(customers().map(|(_, customer)| customer.deliveries));
        let all = district.next - 1 - queue.count();
        same("condition 11", place, all, INITIAL_DELIVERED.saturating_add(delivered))?;
        for (&(_, _, c), customer) in customers() {
            let place = format!("customer {c} of {place}");
            let theirs = || placed.values().filter(|(_, order)| order.customer == c);
            let initial = orders().filter(|((.., number), _)| *number <= INITIAL_ORDERS);
            let initial = initial.map(|(_, order)| order).filter(|order| order.customer == c);
            let all = theirs().map(|(_, order)| *order).chain(initial);
            let delivered = all.filter(|order| order.carrier != 0);
            let delivered = total(delivered.map(Order::amount));
            let paid = self.histories.values().filter(|history| history.customer == (w, d, c));
            let paid = total(paid.map(|history| history.amount)).saturating_add(INITIAL_PAID);
            same("condition 10", &place, customer.balance, delivered.saturating_sub(paid))?;
            let both = customer.balance.saturating_add(customer.paid);
            same("condition 12", &place, both, delivered)?;
            if let (Some(last), Some((number, _))) =
                (self.last.get(&(w, d, c)), theirs().next_back())
            {
                same("the index of last orders", &place, *last, *number)?;
            }
        }
        Ok(())
    }

    /// Checks that a stock's counters agree with the orders that took from it, all of which are
    /// present.
    ///
    /// # Errors
    /// If they do not agree.
    pub fn audit_stock(&self, w: i64, item: i64) -> Result<(), String> {
        let place = format!("the stock of item {item} in warehouse {w}");
        let stock = self.stocks.get(&(w, item)).ok_or_else(|| format!("{place} was not read"))?;
        let placed = self.orders.iter().filter(|((.., number), _)| *number > INITIAL_ORDERS);
        let lines = placed.flat_map(|((from, ..), order)| {
            let taken = order.lines.iter().filter(|line| (line.supply, line.item) == (w, item));
            taken.map(|line| (*from, line.quantity))
        });
        let lines: Vec<(i64, i64)> = lines.collect();
        same("S_YTD", &place, stock.ytd, total(lines.iter().map(|line| line.1)))?;
        same("S_ORDER_CNT", &place, stock.orders, lines.len() as i64)?;
        let remote = lines.iter().filter(|line| line.0 != w).count();
        same("S_REMOTE_CNT", &place, stock.remote, remote as i64)
    }
}
