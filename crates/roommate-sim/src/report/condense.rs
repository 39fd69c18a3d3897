//! Condenses long runs so that they can be embedded, keeping the peaks of step functions, the shape
//! of distributions and the idle periods of GPUs.

use super::Stay;

/// Most rows of a heatmap; more would be thinner than a pixel on most screens.
const HEAT_ROWS_MAX: u32 = 256;
/// Most columns of a heatmap: about one for each pixel of a wide page.
const HEAT_COLS_MAX: usize = 800;
/// The digits of a heatmap cell, from idle to always in use: ASCII that needs no escape in JSON or
/// HTML.
const LEVELS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// A step function in time order, without redundant and non-finite points. It is 0 before its first
/// point.
pub(super) fn clean_steps(points: impl Iterator<Item = (f64, f64)>) -> Vec<(f64, f64)> {
    let mut points: Vec<_> = points.filter(|(t, v)| t.is_finite() && v.is_finite()).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0));
    if points.first().is_none_or(|&(t, _)| t > 0.0) {
        points.insert(0, (0.0, 0.0));
    }
    // Of several values at the same time only the last counts: the others lasted for no time.
    points.dedup_by(|next, kept| {
        let same_time = next.0 == kept.0;
        if same_time {
            kept.1 = next.1;
        }
        same_time
    });
    points.dedup_by(|next, kept| next.1 == kept.1);
    points
}

/// At most `most` points of a clean step function. Each of `most / 4` equal spans of time keeps
/// its first, lowest, highest and last point, which keeps every peak and the level at each
/// boundary.
pub(super) fn thin_steps(points: &[(f64, f64)], end_s: f64, most: usize) -> Vec<(f64, f64)> {
    if points.len() <= most {
        return points.to_vec();
    }
    let spans = (most / 4).max(1);
    let last_t = points.last().map_or(0.0, |p| p.0).max(end_s);
    let span_of = |t: f64| ((t / last_t * spans as f64) as usize).min(spans - 1);
    let mut kept = Vec::with_capacity(most);
    for span in points.chunk_by(|a, b| span_of(a.0) == span_of(b.0)) {
        let mut low = 0;
        let mut high = 0;
        for (i, point) in span.iter().enumerate() {
            if point.1 < span[low].1 {
                low = i;
            }
            if point.1 > span[high].1 {
                high = i;
            }
        }
        let mut picks = [0, low, high, span.len() - 1];
        picks.sort_unstable();
        let mut before = None;
        for pick in picks {
            if before != Some(pick) {
                kept.push(span[pick]);
            }
            before = Some(pick);
        }
    }
    kept
}

/// The mean over time of a clean step function between 0 and `end_s`.
pub(super) fn mean_over_time(points: &[(f64, f64)], end_s: f64) -> f64 {
    means(points, end_s, 1).first().copied().unwrap_or(0.0)
}

/// The means of a clean step function over `spans` equal parts of the time from 0 to `end_s`.
pub(super) fn means(points: &[(f64, f64)], end_s: f64, spans: usize) -> Vec<f64> {
    if end_s <= 0.0 {
        return vec![0.0; spans];
    }
    let width = end_s / spans as f64;
    let mut next = 0;
    let mut value = 0.0;
    (0..spans)
        .map(|span| {
            let to = (span + 1) as f64 * width;
            let mut at = span as f64 * width;
            let mut area = 0.0;
            while next < points.len() && points[next].0 < to {
                let change = points[next].0.max(at);
                area += value * (change - at);
                (at, value) = (change, points[next].1);
                next += 1;
            }
            (area + value * (to - at)) / width
        })
        .collect()
}

/// Points (value, share of all values at or below it) of a distribution, at most `most` of them,
/// evenly spaced in share, always with the smallest and the largest. `sorted` is ascending.
pub(super) fn distribution(sorted: &[f64], most: usize) -> Vec<(f64, f64)> {
    let n = sorted.len();
    let share = |i: usize| (sorted[i], (i + 1) as f64 / n as f64);
    if n <= most || most < 2 {
        return (0..n).map(share).collect();
    }
    (0..most).map(|k| share(k * (n - 1) / (most - 1))).collect()
}

/// A heatmap: for each cell the share of time in which its GPUs had a tenant.
pub(super) struct Heat {
    /// GPUs in one row; the last row may have fewer.
    pub(super) gpus_per_row: u32,
    /// Seconds in one column.
    pub(super) col_s: f64,
    /// Number of columns.
    pub(super) cols: usize,
    /// Row by row, one base-64 digit for each cell; `A` only where no job ran.
    pub(super) cells: String,
}

/// Condenses stays, which are sorted by GPU and time, into at most `cells_max` cells.
pub(super) fn heat(
    stays: &[Stay],
    gpus: u32,
    nodes: &[(u32, u32)],
    end_s: f64,
    cells_max: usize,
) -> Heat {
    let gpus_per_row = gpus_per_row(gpus, nodes);
    let rows = gpus.div_ceil(gpus_per_row) as usize;
    let cols = (cells_max / rows.max(1)).clamp(1, HEAT_COLS_MAX);
    let col_s = if end_s > 0.0 { end_s / cols as f64 } else { 1.0 };
    let mut used_s = vec![0.0f64; rows * cols];
    let mut covered: (u32, f64) = (0, 0.0);
    for stay in stays {
        if stay.gpu != covered.0 {
            covered = (stay.gpu, 0.0);
        }
        // Stays of roommates overlap; the time of a GPU counts once.
        let from = stay.from_s.max(covered.1);
        let to = stay.to_s.min(end_s);
        covered.1 = covered.1.max(to);
        let row = (stay.gpu / gpus_per_row) as usize * cols;
        let mut at = from;
        let mut col = ((from / col_s) as usize).min(cols - 1);
        while at < to {
            let edge = if col + 1 == cols { to } else { to.min((col + 1) as f64 * col_s) };
            used_s[row + col] += (edge - at).max(0.0);
            at = at.max(edge);
            if col + 1 == cols {
                break;
            }
            col += 1;
        }
    }
    let cells = used_s
        .iter()
        .enumerate()
        .map(|(i, &used)| {
            let first = (i / cols) as u32 * gpus_per_row;
            let capacity = f64::from(gpus_per_row.min(gpus - first)) * col_s;
            // Rounded up, so that a short stay on an idle GPU is visible.
            let level = (used / capacity * 63.0 - 1e-6).ceil().clamp(0.0, 63.0) as usize;
            char::from(LEVELS[if used > 0.0 { level.max(1) } else { 0 }])
        })
        .collect();
    Heat { gpus_per_row, col_s, cols, cells }
}

/// The fewest GPUs per row that keep the number of rows within its limit. Rows that divide a node
/// evenly, or hold whole nodes, are preferred, because a row with parts of two nodes has no label.
fn gpus_per_row(gpus: u32, nodes: &[(u32, u32)]) -> u32 {
    let least = gpus.div_ceil(HEAT_ROWS_MAX).max(1);
    let size = nodes.first().map_or(1, |n| n.1).max(1);
    if nodes.iter().any(|n| n.1 != size) {
        return least;
    }
    (least..=least.next_multiple_of(size))
        .find(|k| size.is_multiple_of(*k) || k.is_multiple_of(size))
        .unwrap_or(least)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stay(gpu: u32, from_s: f64, to_s: f64) -> Stay {
        Stay { job: 0, gpu, from_s, to_s, sm_permille: 1000 }
    }

    #[test]
    fn thinned_steps_keep_every_peak_and_valley() {
        let mut points: Vec<(f64, f64)> =
            (0..100_000).map(|i| (f64::from(i), 50.0 + f64::from(i % 7))).collect();
        points[12_345].1 = 9_999.0;
        points[54_321].1 = 0.0;
        let points = clean_steps(points.into_iter());
        let thin = thin_steps(&points, 100_000.0, 2_000);
        assert!(thin.len() <= 2_000, "{}", thin.len());
        assert!(thin.contains(&(12_345.0, 9_999.0)) && thin.contains(&(54_321.0, 0.0)));
        assert_eq!(thin.last(), points.last());
        assert!(thin.is_sorted_by(|a, b| a.0 < b.0));
    }

    #[test]
    fn steps_start_at_zero_and_drop_what_is_not_a_number() {
        let messy =
            [(5.0, 9.0), (5.0, 2.0), (f64::NAN, 1.0), (3.0, 1.0), (4.0, 1.0), (6.0, f64::INFINITY)];
        assert_eq!(clean_steps(messy.into_iter()), [(0.0, 0.0), (3.0, 1.0), (5.0, 2.0)]);
        assert_eq!(clean_steps(std::iter::empty()), [(0.0, 0.0)]);
    }

    #[test]
    fn the_mean_weighs_by_time() {
        assert_eq!(mean_over_time(&[(0.0, 0.0), (2.0, 4.0)], 4.0), 2.0);
        assert_eq!(mean_over_time(&[(0.0, 3.0)], 0.0), 0.0);
        let points = [(0.0, 8.0), (1.0, 4.0), (3.0, 2.0), (9.0, 100.0)];
        assert_eq!(means(&points, 4.0, 2), [6.0, 3.0]);
        assert_eq!(means(&points, 8.0, 4), [6.0, 3.0, 2.0, 2.0]);
    }

    #[test]
    fn a_distribution_keeps_its_ends() {
        let sorted: Vec<f64> = (1..=10_000).map(f64::from).collect();
        let points = distribution(&sorted, 500);
        assert_eq!(points.len(), 500);
        assert_eq!((points[0], points[499]), ((1.0, 1e-4), (10_000.0, 1.0)));
        assert_eq!(distribution(&[7.0], 500), [(7.0, 1.0)]);
        assert!(distribution(&[], 500).is_empty());
    }

    #[test]
    fn heat_counts_a_shared_gpu_once() {
        // GPU 0: two roommates over the same half of the time; GPU 1: a short stay at the end.
        let stays = [stay(0, 0.0, 50.0), stay(0, 10.0, 50.0), stay(1, 99.9, 100.0)];
        let heat = heat(&stays, 2, &[(0, 2)], 100.0, 8);
        assert_eq!((heat.cols, heat.gpus_per_row, heat.col_s), (4, 1, 25.0));
        assert_eq!(heat.cells, "__AAAAAB");
    }

    #[test]
    fn heat_rows_respect_nodes() {
        let nodes: Vec<_> = (0..125).map(|n| (n * 8, 8)).collect();
        assert_eq!(gpus_per_row(1_000, &nodes), 4);
        let nodes: Vec<_> = (0..750).map(|n| (n * 4, 4)).collect();
        assert_eq!(gpus_per_row(3_000, &nodes), 12);
        assert_eq!(gpus_per_row(1_000, &[(0, 1), (1, 999)]), 4);
        assert_eq!(gpus_per_row(0, &[]), 1);
    }
}
