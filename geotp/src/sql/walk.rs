//! Walks over the parser's trees, which are compiled only once.
//!
//! The parser's `visit` is generic over the visitor, and a walk over a whole statement is some
//! hundred thousand instructions. With a copy for each of a dozen visitors, this crate took three
//! times as long to compile. So the walks here take the visitor as a trait object.

use std::ops::ControlFlow;

use sqlparser::ast::{
    Expr, Ident, ObjectName, OrderBy, OrderByExpr, Query, Select, Statement, TableFactor,
    ValueWithSpan, Visit, VisitMut, Visitor, VisitorMut,
};

use super::Refusal;

/// Walks over a part of a statement with `visitor`, until the visitor stops.
pub(super) fn walk(part: &impl Visit, visitor: &mut dyn Visitor<Break = ()>) -> ControlFlow<()> {
    part.visit(&mut Reader { visitor })
}

/// Lets `visitor` change a statement.
///
/// # Errors
/// The refusal with which the visitor stopped. Parts of the statement may have changed.
pub(super) fn walk_mut(
    statement: &mut Statement,
    visitor: &mut dyn VisitorMut<Break = Refusal>,
) -> Result<(), Refusal> {
    let mut writer = Writer { visitor, refusal: None };
    let _ = statement.visit(&mut writer);
    writer.refusal.map_or(Ok(()), Err)
}

struct Reader<'a> {
    visitor: &'a mut dyn Visitor<Break = ()>,
}

struct Writer<'a> {
    visitor: &'a mut dyn VisitorMut<Break = Refusal>,
    /// The refusal is kept here, because the value that stops a walk passes through every level of
    /// it and should be small.
    refusal: Option<Refusal>,
}

impl Writer<'_> {
    fn flow(&mut self, flow: ControlFlow<Refusal>) -> ControlFlow<()> {
        match flow {
            ControlFlow::Continue(()) => ControlFlow::Continue(()),
            ControlFlow::Break(refusal) => {
                self.refusal = Some(refusal);
                ControlFlow::Break(())
            }
        }
    }
}

/// Forwards every call of the trait, including those that no visitor needs yet.
macro_rules! pass_on {
    ($($name:ident: $part:ty,)*) => {
        impl Visitor for Reader<'_> {
            type Break = ();
            $(fn $name(&mut self, part: &$part) -> ControlFlow<()> {
                self.visitor.$name(part)
            })*
        }

        impl VisitorMut for Writer<'_> {
            type Break = ();
            $(fn $name(&mut self, part: &mut $part) -> ControlFlow<()> {
                let flow = self.visitor.$name(part);
                self.flow(flow)
            })*
        }
    };
}

pass_on! {
    pre_visit_query: Query,
    post_visit_query: Query,
    pre_visit_select: Select,
    post_visit_select: Select,
    pre_visit_relation: ObjectName,
    post_visit_relation: ObjectName,
    pre_visit_table_factor: TableFactor,
    post_visit_table_factor: TableFactor,
    pre_visit_expr: Expr,
    post_visit_expr: Expr,
    pre_visit_statement: Statement,
    post_visit_statement: Statement,
    pre_visit_value: ValueWithSpan,
    post_visit_value: ValueWithSpan,
    pre_visit_ident: Ident,
    post_visit_ident: Ident,
    pre_visit_order_by: OrderBy,
    post_visit_order_by: OrderBy,
    pre_visit_order_by_expr: OrderByExpr,
    post_visit_order_by_expr: OrderByExpr,
}
