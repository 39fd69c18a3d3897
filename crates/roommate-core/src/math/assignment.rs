//! The cheapest assignment of rows to columns, a row at a time: shortest augmenting paths over
//! reduced costs (Crouse, On implementing 2D rectangular assignment algorithms, 2016).
//!
//! Among equally short paths the one to a free column is taken, and the lowest of those; that is
//! the order of the usual numerical libraries, so ties are resolved as theirs.

/// An assignment of each row to its own column with the least total cost.
#[derive(Clone, Debug, Default)]
pub struct Assignment {
    /// The column of each row.
    pub column_of: Vec<usize>,
    row_of: Vec<Option<usize>>,
    row_price: Vec<f64>,
    column_price: Vec<f64>,
}

impl Assignment {
    /// Adds a row. There are `columns` from now on, at least as many as before and more than rows;
    /// `cost` of a row in a column may not change between calls.
    pub fn add(&mut self, columns: usize, cost: &dyn Fn(usize, usize) -> f64) {
        let new = self.column_of.len();
        assert!(columns > new && columns >= self.row_of.len(), "a column for every row");
        self.row_of.resize(columns, None);
        self.column_price.resize(columns, 0.0);
        self.column_of.push(usize::MAX);
        self.row_price.push(0.0);
        let mut distance = vec![f64::INFINITY; columns];
        let mut from = vec![new; columns];
        let mut left: Vec<usize> = (0..columns).rev().collect();
        let mut reached: Vec<usize> = Vec::new();
        let (mut row, mut so_far) = (new, 0.0);
        let sink = loop {
            let mut nearest = (f64::INFINITY, 0);
            for (at, column) in left.iter().enumerate() {
                let c = *column;
                let reduced = so_far + cost(row, c) - self.row_price[row] - self.column_price[c];
                if reduced < distance[c] {
                    (distance[c], from[c]) = (reduced, row);
                }
                let free = self.row_of[c].is_none();
                if distance[c] < nearest.0 || (distance[c] == nearest.0 && free) {
                    nearest = (distance[c], at);
                }
            }
            so_far = nearest.0;
            let column = left.swap_remove(nearest.1);
            reached.push(column);
            match self.row_of[column] {
                None => break column,
                Some(next) => row = next,
            }
        };
        self.row_price[new] += so_far;
        for column in &reached {
            if let Some(row) = self.row_of[*column] {
                self.row_price[row] += so_far - distance[*column];
            }
            self.column_price[*column] -= so_far - distance[*column];
        }
        let mut column = sink;
        loop {
            let row = from[column];
            self.row_of[column] = Some(row);
            std::mem::swap(&mut self.column_of[row], &mut column);
            if row == new {
                return;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The least cost by exhaustive search.
    fn least(costs: &[Vec<f64>], row: usize, taken: &mut Vec<bool>) -> f64 {
        if row == costs.len() {
            return 0.0;
        }
        let mut best = f64::INFINITY;
        for c in 0..taken.len() {
            if !std::mem::replace(&mut taken[c], true) {
                best = best.min(costs[row][c] + least(costs, row + 1, taken));
                taken[c] = false;
            }
        }
        best
    }

    #[test]
    fn equals_are_assigned_in_order() {
        let mut found = Assignment::default();
        for _ in 0..4 {
            found.add(6, &|_, _| 1.0);
        }
        assert_eq!(found.column_of, [0, 1, 2, 3]);
    }

    proptest! {
        #[test]
        fn no_other_assignment_is_cheaper(
            costs in prop::collection::vec(prop::collection::vec(0u8..20, 7), 1..6)
        ) {
            let costs: Vec<Vec<f64>> =
                costs.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect();
            let mut found = Assignment::default();
            for row in 0..costs.len() {
                found.add(7, &|r, c| costs[r][c]);
                let sum: f64 = found.column_of.iter().enumerate().map(|(r, c)| costs[r][*c]).sum();
                prop_assert_eq!(sum, least(&costs[..=row], 0, &mut vec![false; 7]));
                let mut columns = found.column_of.clone();
                columns.sort_unstable();
                columns.dedup();
                prop_assert_eq!(columns.len(), row + 1);
            }
        }
    }
}
