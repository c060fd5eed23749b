//! The Python bindings: the only file that knows PyO3.
//!
//! Calls that may take long release the GIL. Plans cross as NumPy arrays; errors become
//! exceptions that keep their text, which names the id and the bound.

use std::sync::Arc;

use numpy::{
    IntoPyArray, PyArray1, PyArray2, PyArrayMethods, PyReadonlyArray2, PyReadwriteArray2,
    PyUntypedArrayMethods,
};
use pyo3::create_exception;
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;

use crate::block_pool::{self, BlockKey, PoolError};
use crate::completion::{self, CompletionError, Progress};
use crate::host_copy;
use crate::request_table::{self, BlockPair, CopyPlan, Group, State, TableError};
use crate::transfer::{self, Direction, Region, Segment, TransferError};

create_exception!(
    preempt_offload._core,
    OffloadError,
    PyException,
    "Base of this package's errors."
);
create_exception!(
    preempt_offload._core,
    CapacityError,
    OffloadError,
    "Too few host blocks; `needed`, `available` and `capacity` count blocks."
);
create_exception!(preempt_offload._core, BlockError, OffloadError, "A host block was misused.");
create_exception!(preempt_offload._core, StateError, OffloadError, "A call out of turn.");
create_exception!(
    preempt_offload._core,
    AddressError,
    OffloadError,
    "A block or address out of bounds."
);

fn capacity_error(text: String, needed: usize, available: usize, capacity: usize) -> PyErr {
    Python::attach(|py| {
        let error = CapacityError::new_err(text);
        let value = error.value(py);
        let set = value
            .setattr("needed", needed)
            .and_then(|()| value.setattr("available", available))
            .and_then(|()| value.setattr("capacity", capacity));
        set.err().unwrap_or(error)
    })
}

impl From<PoolError> for PyErr {
    fn from(error: PoolError) -> Self {
        let text = error.to_string();
        match error {
            PoolError::Exhausted { needed, available, capacity } => {
                capacity_error(text, needed, available, capacity)
            }
            PoolError::HashTooLong { .. } => PyValueError::new_err(text),
            _ => BlockError::new_err(text),
        }
    }
}

impl From<TableError> for PyErr {
    fn from(error: TableError) -> Self {
        let text = error.to_string();
        match error {
            TableError::Capacity { needed, available, capacity } => {
                capacity_error(text, needed, available, capacity)
            }
            TableError::Pool(error) => error.into(),
            TableError::GroupCount { .. } | TableError::TooLong { .. } => {
                PyValueError::new_err(text)
            }
            _ => StateError::new_err(text),
        }
    }
}

impl From<CompletionError> for PyErr {
    fn from(error: CompletionError) -> Self {
        StateError::new_err(error.to_string())
    }
}

impl From<TransferError> for PyErr {
    fn from(error: TransferError) -> Self {
        AddressError::new_err(error.to_string())
    }
}

#[pyclass(frozen, module = "preempt_offload._core")]
struct BlockPool(Arc<block_pool::BlockPool>);

impl BlockPool {
    /// Ids as the pool counts them; what is no id of any pool is none of this one's.
    fn ids(&self, blocks: Vec<i64>) -> PyResult<Vec<block_pool::BlockId>> {
        let capacity = self.0.capacity();
        let foreign = |block| {
            let text =
                format!("block {block} is not in this pool, whose blocks are 1..={capacity}");
            BlockError::new_err(text)
        };
        blocks.into_iter().map(|block| block.try_into().map_err(|_| foreign(block))).collect()
    }
}

#[pymethods]
impl BlockPool {
    #[new]
    #[pyo3(signature = (capacity, *, indexed = false))]
    fn new(capacity: u32, indexed: bool) -> Self {
        Self(Arc::new(block_pool::BlockPool::new(capacity, indexed)))
    }

    #[getter]
    fn capacity(&self) -> usize {
        self.0.capacity()
    }

    #[getter]
    fn num_free(&self) -> usize {
        self.0.num_free()
    }

    #[getter]
    fn num_evictable(&self) -> usize {
        self.0.num_evictable()
    }

    fn ref_count(&self, block: i64) -> PyResult<u32> {
        Ok(self.0.ref_count(self.ids(vec![block])?[0])?)
    }

    fn claim<'py>(&self, py: Python<'py>, n: usize) -> PyResult<Bound<'py, PyArray1<u32>>> {
        Ok(self.0.claim(n)?.into_pyarray(py))
    }

    fn retain(&self, blocks: Vec<i64>) -> PyResult<()> {
        Ok(self.0.retain(&self.ids(blocks)?)?)
    }

    fn release(&self, blocks: Vec<i64>) -> PyResult<()> {
        Ok(self.0.release(&self.ids(blocks)?)?)
    }

    fn index(&self, block: i64, block_hash: &[u8], group: u16) -> PyResult<bool> {
        Ok(self.0.index(self.ids(vec![block])?[0], &BlockKey::new(block_hash, group)?)?)
    }

    fn lookup(&self, block_hash: &[u8], group: u16) -> PyResult<Option<u32>> {
        Ok(self.0.lookup(&BlockKey::new(block_hash, group)?))
    }
}

/// A plan: pairs as rows `(group, device block, host block)`, blocks mirrored, blocks shared.
type PyPlan<'py> = (Bound<'py, PyArray2<u32>>, usize, usize);

fn py_plan(py: Python<'_>, plan: CopyPlan) -> PyResult<PyPlan<'_>> {
    let rows = plan.pairs.len();
    let flat: Vec<u32> =
        plan.pairs.iter().flat_map(|pair| [pair.group, pair.device, pair.host]).collect();
    Ok((flat.into_pyarray(py).reshape([rows, 3])?, plan.mirrored, plan.shared))
}

#[pyclass(frozen, module = "preempt_offload._core")]
struct RequestTable(request_table::RequestTable);

#[pymethods]
impl RequestTable {
    #[new]
    #[pyo3(signature = (pool, block_tokens, *, state_groups = Vec::new()))]
    fn new(pool: &BlockPool, block_tokens: Vec<u64>, state_groups: Vec<usize>) -> PyResult<Self> {
        if block_tokens.is_empty() || block_tokens.contains(&0) {
            let text =
                format!("tokens per block must be positive, one per group: {block_tokens:?}");
            return Err(PyValueError::new_err(text));
        }
        let mut groups: Vec<_> = block_tokens.into_iter().map(Group::attention).collect();
        for index in state_groups {
            let count = groups.len();
            let Some(group) = groups.get_mut(index) else {
                let text = format!("there is no KV cache group {index}; there are {count}");
                return Err(PyValueError::new_err(text));
            };
            group.state = true;
        }
        Ok(Self(request_table::RequestTable::new(pool.0.clone(), groups)))
    }

    fn status(&self, request_id: &str) -> Option<(&'static str, u64)> {
        self.0.status(request_id).map(|(state, num_tokens)| (state.name(), num_tokens))
    }

    fn counts(&self) -> std::collections::HashMap<&'static str, usize> {
        let states = [State::Storing { event: 0 }, State::Ready, State::Loading, State::Mirrored];
        states.map(State::name).into_iter().zip(self.0.counts()).collect()
    }

    fn entries(&self) -> Vec<(String, &'static str, Vec<u32>)> {
        let entries = self.0.snapshot().into_iter();
        entries.map(|entry| (entry.id, entry.state.name(), entry.blocks)).collect()
    }

    #[pyo3(signature = (request_id, event, num_tokens, device_blocks, block_hashes = Vec::new()))]
    fn begin_store<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        event: u64,
        num_tokens: u64,
        device_blocks: Vec<Vec<u32>>,
        block_hashes: Vec<Vec<Vec<u8>>>,
    ) -> PyResult<PyPlan<'py>> {
        let keys = block_hashes
            .iter()
            .enumerate()
            .map(|(group, hashes)| {
                hashes.iter().map(|hash| BlockKey::new(hash, group as u16)).collect()
            })
            .collect::<Result<Vec<Vec<_>>, _>>()?;
        py_plan(py, self.0.begin_store(request_id, event, num_tokens, &device_blocks, &keys)?)
    }

    fn complete_store(&self, request_id: &str, event: u64, ok: bool) -> PyResult<bool> {
        Ok(self.0.complete_store(request_id, event, ok)?)
    }

    fn begin_load<'py>(
        &self,
        py: Python<'py>,
        request_id: &str,
        from_tokens: u64,
        num_tokens: u64,
        device_blocks: Vec<Vec<u32>>,
    ) -> PyResult<PyPlan<'py>> {
        py_plan(py, self.0.begin_load(request_id, from_tokens, num_tokens, &device_blocks)?)
    }

    fn finish_load(&self, request_id: &str, ok: bool) -> PyResult<()> {
        Ok(self.0.finish_load(request_id, ok)?)
    }

    #[pyo3(signature = (request_id, num_tokens = u64::MAX))]
    fn settle(&self, request_id: &str, num_tokens: u64) -> PyResult<()> {
        Ok(self.0.settle(request_id, num_tokens)?)
    }

    fn release(&self, request_id: &str) -> PyResult<bool> {
        Ok(self.0.release(request_id)?)
    }

    fn release_all(&self) -> PyResult<()> {
        Ok(self.0.release_all()?)
    }
}

#[pyclass(frozen, module = "preempt_offload._core")]
struct CompletionTracker(completion::CompletionTracker);

#[pymethods]
impl CompletionTracker {
    #[new]
    fn new(world_size: usize) -> PyResult<Self> {
        if world_size == 0 {
            return Err(PyValueError::new_err("world_size must be positive, not 0"));
        }
        Ok(Self(completion::CompletionTracker::new(world_size)))
    }

    #[getter]
    fn num_open(&self) -> usize {
        self.0.num_open()
    }

    fn open(&self, event: u64) -> PyResult<()> {
        Ok(self.0.open(event)?)
    }

    fn report(&self, event: u64, rank: usize, ok: bool) -> PyResult<Option<bool>> {
        Ok(match self.0.report(event, rank, ok)? {
            Progress::Pending => None,
            Progress::Done => Some(true),
            Progress::Failed => Some(false),
        })
    }
}

fn direction(name: &str) -> PyResult<Direction> {
    match name {
        "d2h" => Ok(Direction::DeviceToHost),
        "h2d" => Ok(Direction::HostToDevice),
        _ => Err(PyValueError::new_err(format!("direction {name:?} is neither 'd2h' nor 'h2d'"))),
    }
}

fn block_pairs(pairs: &PyReadonlyArray2<'_, u32>) -> PyResult<Vec<BlockPair>> {
    if pairs.shape()[1] != 3 {
        let text = format!("pairs must have shape (n, 3), not {:?}", pairs.shape());
        return Err(PyValueError::new_err(text));
    }
    let rows = pairs.as_array();
    Ok(rows
        .rows()
        .into_iter()
        .map(|r| BlockPair { group: r[0], device: r[1], host: r[2] })
        .collect())
}

fn regions(regions: Vec<(u64, u64)>) -> Vec<Region> {
    regions.into_iter().map(|(start, len)| Region { start, len }).collect()
}

/// Source addresses, destination addresses and sizes in bytes.
type PyDescriptors<'py> =
    (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);

#[pyclass(frozen, module = "preempt_offload._core")]
struct BlockLayout(transfer::BlockLayout);

#[pymethods]
impl BlockLayout {
    #[new]
    fn new(
        num_device_blocks: u32,
        num_host_blocks: u32,
        num_groups: usize,
        segments: Vec<(u32, u64, u64, u64, u64, u64)>,
        device_regions: Vec<(u64, u64)>,
        host_regions: Vec<(u64, u64)>,
    ) -> PyResult<Self> {
        let segments: Vec<_> = segments
            .into_iter()
            .map(|(group, device, stride, bytes, host, host_stride)| Segment {
                group,
                device,
                stride,
                bytes,
                host,
                host_stride,
            })
            .collect();
        let layout = transfer::BlockLayout::new(
            num_device_blocks,
            num_host_blocks,
            num_groups,
            &segments,
            &regions(device_regions),
            &regions(host_regions),
        )?;
        Ok(Self(layout))
    }

    fn block_bytes(&self, group: u32) -> u64 {
        self.0.block_bytes(group)
    }

    fn descriptors<'py>(
        &self,
        py: Python<'py>,
        direction: &str,
        pairs: PyReadonlyArray2<'py, u32>,
    ) -> PyResult<PyDescriptors<'py>> {
        let pairs = block_pairs(&pairs)?;
        let (src, dst, size) =
            self.0.descriptors(self::direction(direction)?, &pairs)?.into_arrays();
        Ok((src.into_pyarray(py), dst.into_pyarray(py), size.into_pyarray(py)))
    }

    /// Writes the descriptors into the rows of `out`; returns how many there are.
    fn write_descriptors(
        &self,
        direction: &str,
        pairs: PyReadonlyArray2<'_, u32>,
        mut out: PyReadwriteArray2<'_, i64>,
    ) -> PyResult<usize> {
        let pairs = block_pairs(&pairs)?;
        let shape = out.shape().to_vec();
        let rows = (shape[0] == 3 && out.is_c_contiguous()).then(|| out.as_slice_mut());
        let Some(Ok(rows)) = rows else {
            let text = format!("out must be contiguous, of shape (3, n), not {shape:?}");
            return Err(PyValueError::new_err(text));
        };
        let (src, rest) = rows.split_at_mut(shape[1]);
        let (dst, size) = rest.split_at_mut(shape[1]);
        Ok(self.0.write_descriptors(self::direction(direction)?, &pairs, [src, dst, size])?)
    }

    /// Copies with the processor; returns bytes.
    fn copy(
        &self,
        py: Python<'_>,
        direction: &str,
        pairs: PyReadonlyArray2<'_, u32>,
        threads: usize,
    ) -> PyResult<u64> {
        let pairs = block_pairs(&pairs)?;
        let descriptors = self.0.descriptors(self::direction(direction)?, &pairs)?;
        // SAFETY: descriptors lie in the regions given to `new`, and no block is the
        // destination of two. That these regions are live host memory which nobody else
        // uses during the copy, and that neither the two sides nor the segments of a group
        // overlap, is what the stub's documentation asks of the caller; devices.py, the
        // only one, keeps the tensors behind them alive, and kv_layout.py lays them out.
        py.detach(|| unsafe { host_copy::copy(&descriptors, threads) });
        Ok(descriptors.total_bytes())
    }
}

#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    use super::{
        AddressError, BlockError, BlockLayout, BlockPool, CapacityError, CompletionTracker,
        OffloadError, RequestTable, StateError,
    };
}
