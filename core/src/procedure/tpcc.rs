//! TPC-C's rows, and the transactions whose keys are known beforehand: NewOrder and Payment (TPC
//! Benchmark C, revision 5.11, clauses 1.3, 2.4, 2.5, 4.3.3).
//!
//! Amounts are cents; taxes and discounts are hundredths of a per cent. Rows hold only data that
//! transactions change. Data that never changes is a function of the row's key: names, credit,
//! taxes, discounts, and the whole catalogue of items. A missing row has the content that clause
//! 4.3.3 prescribes, again a function of its key. So a database of any size needs no loading.
//!
//! An order is stored under a *number* that its client chose beforehand, and contains the `O_ID`
//! that its district assigned. With the `O_ID` in its key, the key could not be declared before the
//! district was read. Numbers up to [`INITIAL_ORDERS`] belong to the initial orders. The row of a
//! district lists its last orders. The queue of a district lists the undelivered orders (the table
//! NEW-ORDER), oldest first. An order's row contains its lines.

use std::collections::VecDeque;

use super::{Results, row};
use crate::txn::{AbortReason, Key, Value};

/// Districts of a warehouse.
pub const DISTRICTS: i64 = 10;
/// Customers of a district.
pub const CUSTOMERS: i64 = 3_000;
/// Items of the catalogue.
pub const ITEMS: i64 = 100_000;
/// Orders of a district at the start.
pub const INITIAL_ORDERS: i64 = 3_000;
/// The number of initial orders that are delivered.
pub const INITIAL_DELIVERED: i64 = 2_100;
/// Last names.
pub const NAMES: i64 = 1_000;
/// The number of a district's last orders that StockLevel reads.
pub const RECENT: usize = 20;

/// The initial `W_YTD` of a warehouse.
pub const WAREHOUSE_YTD: i64 = 30_000_000;
/// The initial `D_YTD` of a district.
pub const DISTRICT_YTD: i64 = 3_000_000;
/// The initial `C_YTD_PAYMENT` of a customer.
pub const INITIAL_PAID: i64 = 1_000;

/// The length of the payment history in the row of a customer with bad credit, in numbers: about
/// 500 characters.
const DATA: usize = 120;

/// The key of a warehouse.
#[must_use]
pub fn warehouse_key(w: i64) -> Key {
    format!("warehouse{{{w}}}").into()
}

/// The key of a district.
#[must_use]
pub fn district_key(w: i64, d: i64) -> Key {
    format!("district{{{w}}}:{d}").into()
}

/// The key of a district's queue of undelivered orders.
#[must_use]
pub fn queue_key(w: i64, d: i64) -> Key {
    format!("new-order{{{w}}}:{d}").into()
}

/// The key of a customer.
#[must_use]
pub fn customer_key(w: i64, d: i64, c: i64) -> Key {
    format!("customer{{{w}}}:{d}:{c}").into()
}

/// The key of the number of a customer's last order.
#[must_use]
pub fn last_order_key(w: i64, d: i64, c: i64) -> Key {
    format!("last-order{{{w}}}:{d}:{c}").into()
}

/// The key of an order.
#[must_use]
pub fn order_key(w: i64, d: i64, number: i64) -> Key {
    format!("order{{{w}}}:{d}:{number}").into()
}

/// The key of a warehouse's stock of an item.
#[must_use]
pub fn stock_key(w: i64, item: i64) -> Key {
    format!("stock{{{w}}}:{item}").into()
}

/// The key of a payment to a warehouse.
#[must_use]
pub fn history_key(w: i64, number: i64) -> Key {
    format!("history{{{w}}}:{number}").into()
}

/// The numbers in a key: those in braces, then those that follow, separated by colons.
#[must_use]
pub fn key_numbers(key: &Key) -> Option<Vec<i64>> {
    let text = std::str::from_utf8(key.bytes()).ok()?;
    let (_, text) = text.split_once('{')?;
    let (first, rest) = text.split_once('}')?;
    let rest = rest.split(':').filter(|word| !word.is_empty());
    std::iter::once(first).chain(rest).map(|word| word.parse().ok()).collect()
}

/// A pseudo-random number from 0 to below `bound`: a function of its purpose and of the row.
fn drawn(purpose: i64, ids: [i64; 4], bound: i64) -> i64 {
    let mut bits = 0x9e37_79b9_7f4a_7c15_u64;
    for word in ids.into_iter().chain([purpose]) {
        bits = (bits ^ word.cast_unsigned()).wrapping_mul(0xff51_afd7_ed55_8ccd);
        bits ^= bits >> 32;
    }
    // Two purposes differ only in their last bits. Without this step their numbers would be
    // similar.
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    i64::try_from(bits % bound.max(1).cast_unsigned()).unwrap_or_default()
}

/// `W_TAX`, to 20 %.
#[must_use]
pub fn warehouse_tax(w: i64) -> i64 {
    drawn(1, [w, 0, 0, 0], 2_001)
}

/// `D_TAX`, to 20 %.
#[must_use]
pub fn district_tax(w: i64, d: i64) -> i64 {
    drawn(2, [w, d, 0, 0], 2_001)
}

/// `C_DISCOUNT`, to 50 %.
#[must_use]
pub fn discount(w: i64, d: i64, c: i64) -> i64 {
    drawn(3, [w, d, c, 0], 5_001)
}

/// True if the customer has bad credit (`C_CREDIT`), as one in ten customers has.
#[must_use]
pub fn has_bad_credit(w: i64, d: i64, c: i64) -> bool {
    drawn(4, [w, d, c, 0], 10) == 0
}

/// The number of the customer's last name (`C_LAST`, clause 4.3.2.3). Each of the first thousand
/// customers has a different one; the others have NURand(255, 0, 999) with a constant of 0.
#[must_use]
pub fn last_name(w: i64, d: i64, c: i64) -> i64 {
    if c <= NAMES {
        c - 1
    } else {
        (drawn(5, [w, d, c, 0], 256) | drawn(6, [w, d, c, 0], NAMES)) % NAMES
    }
}

/// The position of the customer's first name in alphabetical order (`C_FIRST`).
#[must_use]
pub fn first_name(w: i64, d: i64, c: i64) -> i64 {
    drawn(7, [w, d, c, 0], i64::MAX)
}

/// The customers of a district with that last name.
#[must_use]
pub fn customers_named(w: i64, d: i64, name: i64) -> Vec<i64> {
    (1..=CUSTOMERS).filter(|&c| last_name(w, d, c) == name).collect()
}

/// The customer to choose among those with one last name: the one in the middle by first name,
/// rounded up (clause 2.5.2.2).
#[must_use]
pub fn middle(w: i64, d: i64, mut customers: Vec<i64>) -> Option<i64> {
    customers.sort_unstable_by_key(|&c| (first_name(w, d, c), c));
    customers.get(customers.len().checked_sub(1)? / 2).copied()
}

/// `I_PRICE`, from 1.00 to 100.00; none if the catalogue does not have the item.
#[must_use]
pub fn price(item: i64) -> Option<i64> {
    (1..=ITEMS).contains(&item).then(|| 100 + drawn(8, [item, 0, 0, 0], 9_901))
}

/// Maps customers to initial orders by multiplication. `A` and 3000 have no common divisor, so each
/// customer has one of the initial orders.
const A: i64 = 1_783;

/// The customer of an initial order.
fn initial_customer(w: i64, d: i64, number: i64) -> i64 {
    let shift = drawn(9, [w, d, 0, 0], CUSTOMERS);
    (number * A + shift) % CUSTOMERS + 1
}

/// The initial order of a customer.
#[must_use]
pub fn initial_order_of(w: i64, d: i64, c: i64) -> i64 {
    // A · INVERSE = 1 (mod 3000).
    const INVERSE: i64 = 1_447;
    let shift = drawn(9, [w, d, 0, 0], CUSTOMERS);
    let number = ((c - 1 - shift).rem_euclid(CUSTOMERS) * INVERSE) % CUSTOMERS;
    if number == 0 { CUSTOMERS } else { number }
}

/// The numbers of a row that is a single group.
fn group<const N: usize>(value: &Value) -> Option<[i64; N]> {
    let groups = row::parse(value)?;
    match groups.as_slice() {
        [group] => group.as_slice().try_into().ok(),
        _ => None,
    }
}

/// A warehouse.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Warehouse {
    /// `W_YTD`.
    pub ytd: i64,
}

impl Warehouse {
    /// From its row.
    #[must_use]
    pub fn parse(value: Option<&Value>) -> Option<Self> {
        let Some(value) = value else { return Some(Self { ytd: WAREHOUSE_YTD }) };
        let [ytd] = group(value)?;
        Some(Self { ytd })
    }

    /// Its row.
    #[must_use]
    pub fn value(self) -> Value {
        row::format([[self.ytd].as_slice()])
    }
}

/// A district.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct District {
    /// `D_NEXT_O_ID`.
    pub next: i64,
    /// `D_YTD`.
    pub ytd: i64,
    /// Numbers of its last orders, oldest first: at most [`RECENT`], without the initial ones.
    pub recent: Vec<i64>,
}

impl District {
    /// From its row.
    #[must_use]
    pub fn parse(value: Option<&Value>) -> Option<Self> {
        let Some(value) = value else {
            return Some(Self { next: INITIAL_ORDERS + 1, ytd: DISTRICT_YTD, recent: Vec::new() });
        };
        let mut groups = row::parse(value)?;
        let recent = groups.pop()?;
        match groups.as_slice() {
            [first] => match first.as_slice() {
                &[next, ytd] => Some(Self { next, ytd, recent }),
                _ => None,
            },
            _ => None,
        }
    }

    /// Its row.
    #[must_use]
    pub fn value(&self) -> Value {
        row::format([[self.next, self.ytd].as_slice(), self.recent.as_slice()])
    }

    /// Numbers of its last [`RECENT`] orders, including initial ones.
    #[must_use]
    pub fn last_orders(&self) -> Vec<i64> {
        let missing = i64::try_from(RECENT.saturating_sub(self.recent.len())).unwrap_or_default();
        (INITIAL_ORDERS - missing + 1..=INITIAL_ORDERS).chain(self.recent.iter().copied()).collect()
    }
}

/// A district's undelivered orders: the table NEW-ORDER.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Queue {
    /// The first initial order that is not delivered; [`INITIAL_ORDERS`] + 1 if all are.
    pub initial: i64,
    /// `O_ID` and number of the others, oldest first.
    pub orders: VecDeque<(i64, i64)>,
}

impl Queue {
    /// From its row.
    #[must_use]
    pub fn parse(value: Option<&Value>) -> Option<Self> {
        let Some(value) = value else {
            return Some(Self { initial: INITIAL_DELIVERED + 1, orders: VecDeque::new() });
        };
        let groups = row::parse(value)?;
        let [first, ids, numbers] = groups.as_slice() else { return None };
        let &[initial] = first.as_slice() else { return None };
        let orders = ids.iter().copied().zip(numbers.iter().copied()).collect();
        (ids.len() == numbers.len()).then_some(Self { initial, orders })
    }

    /// Its row.
    #[must_use]
    pub fn value(&self) -> Value {
        let (ids, numbers): (Vec<i64>, Vec<i64>) = self.orders.iter().copied().unzip();
        row::format([[self.initial].as_slice(), ids.as_slice(), numbers.as_slice()])
    }

    /// `O_ID` and number of the oldest order.
    #[must_use]
    pub fn oldest(&self) -> Option<(i64, i64)> {
        if self.initial <= INITIAL_ORDERS {
            Some((self.initial, self.initial))
        } else {
            self.orders.front().copied()
        }
    }

    /// Removes the oldest order.
    pub fn pop(&mut self) {
        if self.initial <= INITIAL_ORDERS {
            self.initial += 1;
        } else {
            self.orders.pop_front();
        }
    }

    /// The number of undelivered orders.
    #[must_use]
    pub fn count(&self) -> i64 {
        let others = i64::try_from(self.orders.len()).unwrap_or(i64::MAX);
        (INITIAL_ORDERS + 1 - self.initial).saturating_add(others)
    }
}

/// A customer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Customer {
    /// `C_BALANCE`: the total of delivered orders, minus payments.
    pub balance: i64,
    /// `C_YTD_PAYMENT`.
    pub paid: i64,
    /// `C_PAYMENT_CNT`.
    pub payments: i64,
    /// `C_DELIVERY_CNT`.
    pub deliveries: i64,
    /// `C_DATA`: for customers with bad credit, their last payments; six numbers each, the last
    /// payment first.
    pub data: Vec<i64>,
}

impl Customer {
    /// From its row.
    #[must_use]
    pub fn parse(value: Option<&Value>) -> Option<Self> {
        let Some(value) = value else {
            return Some(Self {
                balance: -INITIAL_PAID,
                paid: INITIAL_PAID,
                payments: 1,
                deliveries: 0,
                data: Vec::new(),
            });
        };
        let mut groups = row::parse(value)?;
        let data = groups.pop()?;
        match groups.as_slice() {
            [first] => match first.as_slice() {
                &[balance, paid, payments, deliveries] => {
                    Some(Self { balance, paid, payments, deliveries, data })
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Its row.
    #[must_use]
    pub fn value(&self) -> Value {
        let first = [self.balance, self.paid, self.payments, self.deliveries];
        row::format([first.as_slice(), self.data.as_slice()])
    }
}

/// One line of an order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Line {
    /// `OL_I_ID`.
    pub item: i64,
    /// `OL_SUPPLY_W_ID`.
    pub supply: i64,
    /// `OL_QUANTITY`.
    pub quantity: i64,
    /// `OL_AMOUNT`.
    pub amount: i64,
    /// `OL_DELIVERY_D`: the number of the delivery; 0 before it.
    pub delivered: i64,
}

/// An order with its lines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Order {
    /// `O_ID`.
    pub id: i64,
    /// `O_C_ID`.
    pub customer: i64,
    /// `O_CARRIER_ID`; 0 if there is none yet.
    pub carrier: i64,
    /// `O_OL_CNT`.
    pub count: i64,
    /// The price for the customer, with discount and taxes.
    pub total: i64,
    /// Its order lines.
    pub lines: Vec<Line>,
}

impl Order {
    /// Reads a row; none if there is no such order.
    #[must_use]
    pub fn parse(value: Option<&Value>, w: i64, d: i64, number: i64) -> Option<Self> {
        let Some(value) = value else { return Self::initial(w, d, number) };
        let groups = row::parse(value)?;
        let (first, rest) = groups.split_first()?;
        let &[id, customer, carrier, count, total] = first.as_slice() else { return None };
        let line = |line: &Vec<i64>| match line.as_slice() {
            &[item, supply, quantity, amount, delivered] => {
                Some(Line { item, supply, quantity, amount, delivered })
            }
            _ => None,
        };
        let lines = rest.iter().map(line).collect::<Option<_>>()?;
        Some(Self { id, customer, carrier, count, total, lines })
    }

    /// An order as the database is populated with it (clause 4.3.3.1).
    fn initial(w: i64, d: i64, number: i64) -> Option<Self> {
        if !(1..=INITIAL_ORDERS).contains(&number) {
            return None;
        }
        let is_delivered = number <= INITIAL_DELIVERED;
        let count = 5 + drawn(10, [w, d, number, 0], 11);
        let line = |at| {
            let ids = [w, d, number, at];
            let amount = if is_delivered { 0 } else { 1 + drawn(11, ids, 999_999) };
            let item = 1 + drawn(12, ids, ITEMS);
            Line { item, supply: w, quantity: 5, amount, delivered: i64::from(is_delivered) }
        };
        let lines: Vec<Line> = (0..count).map(line).collect();
        let carrier = if is_delivered { 1 + drawn(13, [w, d, number, 0], 10) } else { 0 };
        let customer = initial_customer(w, d, number);
        Some(Self { id: number, customer, carrier, count, total: 0, lines })
    }

    /// Its row.
    #[must_use]
    pub fn value(&self) -> Value {
        let first = [self.id, self.customer, self.carrier, self.count, self.total];
        let line =
            |line: &Line| [line.item, line.supply, line.quantity, line.amount, line.delivered];
        let lines: Vec<[i64; 5]> = self.lines.iter().map(line).collect();
        let lines = lines.iter().map(<[i64; 5]>::as_slice);
        row::format(std::iter::once(first.as_slice()).chain(lines))
    }

    /// The sum of its lines.
    #[must_use]
    pub fn amount(&self) -> i64 {
        self.lines.iter().fold(0, |sum, line| line.amount.saturating_add(sum))
    }
}

/// A warehouse's stock of an item.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stock {
    /// `S_QUANTITY`.
    pub quantity: i64,
    /// `S_YTD`.
    pub ytd: i64,
    /// `S_ORDER_CNT`.
    pub orders: i64,
    /// `S_REMOTE_CNT`.
    pub remote: i64,
}

impl Stock {
    /// From its row.
    #[must_use]
    pub fn parse(value: Option<&Value>, w: i64, item: i64) -> Option<Self> {
        let Some(value) = value else {
            let quantity = 10 + drawn(14, [w, item, 0, 0], 91);
            return Some(Self { quantity, ytd: 0, orders: 0, remote: 0 });
        };
        let [quantity, ytd, orders, remote] = group(value)?;
        Some(Self { quantity, ytd, orders, remote })
    }

    /// Its row.
    #[must_use]
    pub fn value(self) -> Value {
        row::format([[self.quantity, self.ytd, self.orders, self.remote].as_slice()])
    }

    /// Takes `quantity` items. Restocks if fewer than ten would be left (clause 2.4.2.2).
    fn take(&mut self, quantity: i64, is_remote: bool) {
        let refill = if self.quantity >= quantity + 10 { 0 } else { 91 };
        self.quantity += refill - quantity;
        self.ytd += quantity;
        self.orders += 1;
        self.remote += i64::from(is_remote);
    }
}

/// A payment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct History {
    /// `H_D_ID`: the district that was paid.
    pub district: i64,
    /// The customer who paid: warehouse, district and number.
    pub customer: (i64, i64, i64),
    /// `H_AMOUNT`.
    pub amount: i64,
}

impl History {
    /// From its row.
    #[must_use]
    pub fn parse(value: &Value) -> Option<Self> {
        let [district, w, d, c, amount] = group(value)?;
        Some(Self { district, customer: (w, d, c), amount })
    }

    /// Its row.
    #[must_use]
    pub fn value(self) -> Value {
        let (w, d, c) = self.customer;
        row::format([[self.district, w, d, c, self.amount].as_slice()])
    }
}

/// NewOrder (clause 2.4).
///
/// Arguments: warehouse, district, customer and number of the order; then for each line the item,
/// the supplying warehouse and the quantity. No two lines have the same item of the same warehouse.
/// Reads the warehouse, the district, its queue, the customer, and the stock of each line. Writes
/// the district, the queue, the order, the customer's last order, and the stock of each line.
///
/// # Errors
/// A guard, if an item is not in the catalogue, as in the last line of one order in a hundred; or
/// if rows or arguments have the wrong form.
pub fn new_order(reads: &[Option<Value>], arguments: &Value) -> Results {
    new_order_of(reads, arguments).ok_or(AbortReason::Guard)
}

fn new_order_of(reads: &[Option<Value>], arguments: &Value) -> Option<Vec<Option<Value>>> {
    let groups = row::parse(arguments)?;
    let (head, wanted) = groups.split_first()?;
    let &[w, d, c, number] = head.as_slice() else { return None };
    let (fixed, stocks) = reads.split_first_chunk::<4>()?;
    let [warehouse, district, queue, customer] = fixed;
    if stocks.len() != wanted.len() || number <= INITIAL_ORDERS {
        return None;
    }
    Warehouse::parse(warehouse.as_ref())?;
    Customer::parse(customer.as_ref())?;
    let mut district = District::parse(district.as_ref())?;
    let mut queue = Queue::parse(queue.as_ref())?;
    let (mut lines, mut left) = (Vec::new(), Vec::new());
    for (line, stock) in wanted.iter().zip(stocks) {
        let &[item, supply, quantity] = line.as_slice() else { return None };
        let amount = price(item)?.checked_mul(quantity)?;
        let mut stock = Stock::parse(stock.as_ref(), supply, item)?;
        stock.take(quantity, supply != w);
        left.push(Some(stock.value()));
        lines.push(Line { item, supply, quantity, amount, delivered: 0 });
    }
    let count = i64::try_from(lines.len()).ok()?;
    let mut order = Order { id: district.next, customer: c, carrier: 0, count, total: 0, lines };
    let rate = (10_000 - discount(w, d, c)) * (10_000 + warehouse_tax(w) + district_tax(w, d));
    order.total = order.amount().checked_mul(rate)? / 100_000_000;
    queue.orders.push_back((district.next, number));
    district.next = district.next.checked_add(1)?;
    if district.recent.len() >= RECENT {
        district.recent.remove(0);
    }
    district.recent.push(number);
    let last = row::format([[number].as_slice()]);
    let mut writes =
        vec![Some(district.value()), Some(queue.value()), Some(order.value()), Some(last)];
    writes.append(&mut left);
    Some(writes)
}

/// The number in the row of a customer's last order.
#[must_use]
pub fn last_order(value: Option<&Value>, w: i64, d: i64, c: i64) -> Option<i64> {
    let Some(value) = value else { return Some(initial_order_of(w, d, c)) };
    let [number] = group(value)?;
    Some(number)
}

/// Payment (clause 2.5).
///
/// Arguments: the warehouse and district that receive the payment; warehouse, district and number
/// of the customer; the amount; the payment's number; then the customers to read. Those are all
/// customers with one last name, of whom the paying customer is the one in the middle, or the
/// paying customer alone. Reads the warehouse, the district and those customers. Writes the
/// warehouse, the district, the customer and the payment.
///
/// # Errors
/// A guard, if rows or arguments have the wrong form, or the customer is not the one in the middle.
pub fn payment(reads: &[Option<Value>], arguments: &Value) -> Results {
    payment_of(reads, arguments).ok_or(AbortReason::Guard)
}

fn payment_of(reads: &[Option<Value>], arguments: &Value) -> Option<Vec<Option<Value>>> {
    let groups = row::parse(arguments)?;
    let [head, named] = groups.as_slice() else { return None };
    let &[w, d, cw, cd, c, amount, _number] = head.as_slice() else { return None };
    let (fixed, customers) = reads.split_first_chunk::<2>()?;
    let [warehouse, district] = fixed;
    if customers.len() != named.len() || middle(cw, cd, named.clone()) != Some(c) {
        return None;
    }
    let mut warehouse = Warehouse::parse(warehouse.as_ref())?;
    let mut district = District::parse(district.as_ref())?;
    let chosen = named.iter().zip(customers).find(|(named, _)| **named == c);
    let mut customer = Customer::parse(chosen?.1.as_ref())?;
    warehouse.ytd = warehouse.ytd.checked_add(amount)?;
    district.ytd = district.ytd.checked_add(amount)?;
    customer.balance = customer.balance.checked_sub(amount)?;
    customer.paid = customer.paid.checked_add(amount)?;
    customer.payments += 1;
    if has_bad_credit(cw, cd, c) {
        customer.data.splice(0..0, [c, cd, cw, d, w, amount]);
        customer.data.truncate(DATA);
    }
    let history = History { district: d, customer: (cw, cd, c), amount };
    Some(
        [warehouse.value(), district.value(), customer.value(), history.value()]
            .map(Some)
            .into_iter()
            .collect(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_customer_has_one_initial_order() {
        assert_eq!(A * 1_447 % CUSTOMERS, 1);
        for (w, d) in [(0, 1), (17, 10)] {
            let mut customers: Vec<i64> = (1..=INITIAL_ORDERS)
                .map(|number| Order::parse(None, w, d, number).unwrap().customer)
                .collect();
            for (number, &c) in (1..).zip(&customers) {
                assert_eq!(initial_order_of(w, d, c), number);
            }
            customers.sort_unstable();
            assert_eq!(customers, (1..=CUSTOMERS).collect::<Vec<_>>());
        }
        assert_eq!(Order::parse(None, 1, 1, 3_001), None);
        assert_eq!(Order::parse(None, 1, 1, 0), None);
    }

    #[test]
    fn initial_rows_are_as_clause_4_3_3_says() {
        let orders: Vec<Order> =
            (1..=3_000).map(|n| Order::parse(None, 3, 4, n).unwrap()).collect();
        let (delivered, others) = orders.split_at(2_100);
        for order in delivered {
            assert!((1..=10).contains(&order.carrier) && order.amount() == 0, "{order:?}");
            assert!(order.lines.iter().all(|line| line.delivered > 0), "{order:?}");
        }
        for order in others {
            assert!(order.carrier == 0, "{order:?}");
            assert!(order.lines.iter().all(|line| line.delivered == 0 && line.amount > 0));
        }
        let lengths: Vec<usize> = orders.iter().map(|order| order.lines.len()).collect();
        assert_eq!((lengths.iter().min(), lengths.iter().max()), (Some(&5), Some(&15)));
        let stock: Vec<i64> =
            (1..=5_000).map(|i| Stock::parse(None, 3, i).unwrap().quantity).collect();
        assert_eq!((stock.iter().min(), stock.iter().max()), (Some(&10), Some(&100)));
        let prices: Vec<i64> = (1..=ITEMS).filter_map(price).collect();
        assert_eq!((prices.iter().min(), prices.iter().max()), (Some(&100), Some(&10_000)));
        assert_eq!((price(0), price(ITEMS + 1)), (None, None));
        let bad = (1..=CUSTOMERS).filter(|&c| has_bad_credit(3, 4, c)).count();
        assert!((240..360).contains(&bad), "{bad} of 3000 have bad credit");
    }

    #[test]
    fn every_name_is_somebodys_and_the_middle_one_is_found() {
        let mut seen = 0;
        for name in 0..NAMES {
            let customers = customers_named(5, 6, name);
            assert!(!customers.is_empty());
            seen += customers.len();
            let c = middle(5, 6, customers.clone()).unwrap();
            let before = |other: &&i64| first_name(5, 6, **other) < first_name(5, 6, c);
            assert_eq!(customers.iter().filter(before).count(), customers.len().div_ceil(2) - 1);
        }
        assert_eq!(seen, 3_000);
        // If the two draws of NURand are independent, a name that a client asks for, with its
        // constant of 87, has 1.97 bearers on average; here over all draws and five districts.
        let names = (0..256_i64).flat_map(|low| (0..1_000).map(move |y| ((low | y) + 87) % NAMES));
        let mut bearers = vec![0_u64; 1_000];
        for w in 0..5 {
            for c in 1..=CUSTOMERS {
                bearers[usize::try_from(last_name(w, 6, c)).unwrap()] += 1;
            }
        }
        let all: u64 = names.map(|name| bearers[usize::try_from(name).unwrap()]).sum();
        assert!((2_380_000..2_680_000).contains(&all), "{all}");
        assert_eq!(middle(5, 6, Vec::new()), None);
    }

    #[test]
    fn rows_come_back_as_they_were() {
        let order = Order::parse(None, 1, 2, 2_999).unwrap();
        assert_eq!(Order::parse(Some(&order.value()), 1, 2, 2_999), Some(order));
        let district = District { next: 3_005, ytd: 7, recent: vec![4_001, 4_009] };
        assert_eq!(District::parse(Some(&district.value())), Some(district.clone()));
        assert_eq!(district.last_orders().len(), RECENT);
        assert_eq!(district.last_orders().first(), Some(&2_983));
        let fresh = District::parse(None).unwrap();
        assert_eq!(District::parse(Some(&fresh.value())), Some(fresh));
        let queue = Queue { initial: 3_001, orders: [(3_001, 9_000), (3_002, 8_000)].into() };
        assert_eq!(Queue::parse(Some(&queue.value())), Some(queue));
        let empty = Queue { initial: 3_001, orders: VecDeque::new() };
        assert_eq!(Queue::parse(Some(&empty.value())), Some(empty));
        let mut customer = Customer::parse(None).unwrap();
        assert_eq!(Customer::parse(Some(&customer.value())), Some(customer.clone()));
        customer.data = vec![1, 2, 3];
        assert_eq!(Customer::parse(Some(&customer.value())), Some(customer));
        let stock = Stock { quantity: 1, ytd: 2, orders: 3, remote: 4 };
        assert_eq!(Stock::parse(Some(&stock.value()), 1, 1), Some(stock));
        let history = History { district: 3, customer: (1, 2, 3), amount: 4 };
        assert_eq!(History::parse(&history.value()), Some(history));
        assert_eq!(key_numbers(&order_key(3, 4, 5)), Some(vec![3, 4, 5]));
        assert_eq!(key_numbers(&warehouse_key(3)), Some(vec![3]));
        assert_eq!(key_numbers(&"order:5".into()), None);
    }

    #[test]
    fn an_order_gets_the_next_number_of_its_district_and_takes_stock() {
        let args = "1 2 30 4001|11 1 3|12 7 10";
        let writes = new_order(&vec![None; 6], &args.into()).unwrap();
        let district = District::parse(writes[0].as_ref()).unwrap();
        assert_eq!((district.next, district.recent.as_slice()), (3_002, [4_001].as_slice()));
        let queue = Queue::parse(writes[1].as_ref()).unwrap();
        assert_eq!((queue.count(), queue.oldest()), (901, Some((2_101, 2_101))));
        assert_eq!(queue.orders, [(3_001, 4_001)]);
        let order = Order::parse(writes[2].as_ref(), 1, 2, 4_001).unwrap();
        assert_eq!((order.id, order.customer, order.count), (3_001, 30, 2));
        let amount = 3 * price(11).unwrap() + 10 * price(12).unwrap();
        assert_eq!(order.amount(), amount);
        let rate = (10_000 - discount(1, 2, 30)) * (10_000 + warehouse_tax(1) + district_tax(1, 2));
        assert_eq!(order.total, amount * rate / 100_000_000);
        assert_eq!(last_order(writes[3].as_ref(), 1, 2, 30), Some(4_001));
        let before = Stock::parse(None, 7, 12).unwrap().quantity;
        let stock = Stock::parse(writes[5].as_ref(), 7, 12).unwrap();
        let expected = if before >= 20 { before - 10 } else { before + 81 };
        assert_eq!(stock, Stock { quantity: expected, ytd: 10, orders: 1, remote: 1 });
        assert_eq!(Stock::parse(writes[4].as_ref(), 1, 11).unwrap().remote, 0);
    }

    #[test]
    fn an_order_of_an_item_that_does_not_exist_is_rolled_back() {
        let args = "1 2 30 4001|11 1 3|100001 1 1";
        assert_eq!(new_order(&vec![None; 6], &args.into()), Err(AbortReason::Guard));
        assert_eq!(new_order(&vec![None; 5], &args.into()), Err(AbortReason::Guard));
        // The number of an initial order must not be reused.
        let args = "1 2 30 3000|11 1 3";
        assert_eq!(new_order(&vec![None; 5], &args.into()), Err(AbortReason::Guard));
    }

    #[test]
    fn stock_is_filled_up_before_less_than_ten_are_left() {
        for (before, taken, after) in [(20, 10, 10), (19, 10, 100), (15, 5, 10), (14, 5, 100)] {
            let mut stock = Stock { quantity: before, ytd: 0, orders: 0, remote: 0 };
            stock.take(taken, false);
            assert_eq!(stock.quantity, after);
        }
    }

    #[test]
    fn a_payment_is_booked_four_times() {
        let (cw, cd) = (9, 4);
        let named = customers_named(cw, cd, 300);
        let c = middle(cw, cd, named.clone()).unwrap();
        let list = named.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ");
        let args = format!("1 2 {cw} {cd} {c} 500 77|{list}");
        let reads = vec![None; 2 + named.len()];
        let writes = payment(&reads, &args.into()).unwrap();
        assert_eq!(Warehouse::parse(writes[0].as_ref()).unwrap().ytd, WAREHOUSE_YTD + 500);
        assert_eq!(District::parse(writes[1].as_ref()).unwrap().ytd, DISTRICT_YTD + 500);
        let customer = Customer::parse(writes[2].as_ref()).unwrap();
        assert_eq!((customer.balance, customer.paid, customer.payments), (-1_500, 1_500, 2));
        let history = History::parse(writes[3].as_ref().unwrap()).unwrap();
        assert_eq!(history, History { district: 2, customer: (cw, cd, c), amount: 500 });
        // A customer who is not in the middle is refused.
        let other = named.iter().find(|other| **other != c);
        if let Some(other) = other {
            let args = format!("1 2 {cw} {cd} {other} 500 77|{list}");
            assert_eq!(payment(&reads, &args.into()), Err(AbortReason::Guard));
        }
    }

    #[test]
    fn bad_credit_remembers_payments_to_a_bound() {
        let c = (1..=CUSTOMERS).find(|&c| has_bad_credit(1, 1, c)).unwrap();
        let mut row = None;
        for number in 0..50 {
            let args = format!("1 1 1 1 {c} {} {number}|{c}", 100 + number);
            row = payment(&[None, None, row], &args.into()).unwrap().swap_remove(2);
        }
        let data = Customer::parse(row.as_ref()).unwrap().data;
        assert_eq!(data.len(), DATA);
        assert_eq!(data[..6], [c, 1, 1, 1, 1, 149]);
    }
}
