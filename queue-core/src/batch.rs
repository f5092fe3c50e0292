//! Batches: how much one statement is given at a time.

use std::collections::HashSet;

use crate::JobId;
use crate::NewJob;
use crate::UpdateRequest;

/// What a batch is made of.
pub trait BatchItem {
    /// The row that it is about.
    fn id(&self) -> JobId;

    /// The bytes of its texts that have no small bound.
    fn bytes(&self) -> usize;
}

impl BatchItem for NewJob {
    fn id(&self) -> JobId {
        self.id
    }

    fn bytes(&self) -> usize {
        self.payload.bytes()
    }
}

impl BatchItem for UpdateRequest {
    fn id(&self) -> JobId {
        self.id
    }

    fn bytes(&self) -> usize {
        self.patch.bytes()
    }
}

impl<T: BatchItem> BatchItem for &T {
    fn id(&self) -> JobId {
        (*self).id()
    }

    fn bytes(&self) -> usize {
        (*self).bytes()
    }
}

/// Cuts a batch where a statement would get too long for comfort (1000 rows, 4 MiB), or would be about one row twice. For
/// backends; the pieces are in order, none is empty, and no two items of one have the same id.
pub fn chunks<T: BatchItem>(items: &[T]) -> Vec<&[T]> {
    const ROWS: usize = 1000;
    const BYTES: usize = 4 * 1024 * 1024;
    let mut chunks = Vec::new();
    let (mut start, mut size, mut ids) = (0, 0, HashSet::new());
    for (index, item) in items.iter().enumerate() {
        size += item.bytes();
        if !ids.insert(item.id()) || ids.len() > ROWS || size > BYTES && index > start {
            chunks.push(&items[start..index]);
            (start, size, ids) = (index, item.bytes(), HashSet::from([item.id()]));
        }
    }
    if start < items.len() {
        chunks.push(&items[start..]);
    }
    chunks
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Item(u128, usize);

    impl BatchItem for Item {
        fn id(&self) -> JobId {
            uuid::Uuid::from_u128(self.0).into()
        }

        fn bytes(&self) -> usize {
            self.1
        }
    }

    #[test]
    fn a_batch_is_cut_by_rows_by_bytes_and_before_a_row_that_it_has() {
        let lengths = |ids: &[u128], bytes: usize| -> Vec<_> {
            let items: Vec<_> = ids.iter().map(|id| Item(*id, bytes)).collect();
            chunks(&items).into_iter().map(<[Item]>::len).collect()
        };
        let distinct: Vec<_> = (0..2_500).collect();
        assert_eq!(lengths(&distinct, 1), [1000, 1000, 500]);
        assert_eq!(lengths(&distinct[..5], 2 * 1024 * 1024), [2, 2, 1]);
        assert_eq!(lengths(&distinct[..3], usize::MAX / 8), [1, 1, 1], "one that is too long goes alone");
        assert_eq!(lengths(&[1, 2, 1, 1, 2], 1), [2, 1, 2]);
        assert!(lengths(&[], 1).is_empty());
    }
}
