// What forward returned: the tensors in it. Part of the bindings, not of the reading path.
//
// Looked for at every forward, so nothing of the program's runs meanwhile: containers are read where they keep their
// items, whatever their class makes of access. That costs a few nanoseconds an object.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <torch/csrc/autograd/python_variable.h>

#include <c10/util/flat_hash_map.h>

#include <vector>

namespace minddp {

class TensorsInOutput {
 public:
  // `references`: the class of RPC's references; any other where there is none.
  TensorsInOutput(pybind11::handle output, pybind11::type references)
      : references_(reinterpret_cast<PyTypeObject*>(references.ptr())) {
    push(output.ptr());
    while (!open_.empty()) {
      PyObject* next = open_.back();
      open_.pop_back();
      visit(next);
    }
  }
  // Those that require a gradient; where none does, one of the others, if there is any.
  std::vector<at::Tensor> take() && {
    if (found_.empty() && other_.defined()) found_.push_back(std::move(other_));
    return std::move(found_);
  }

 private:
  static bool is_a(PyObject* object, PyTypeObject* type) { return PyObject_TypeCheck(object, type); }

  // Tensors at once, containers later, each once; the rest is passed over.
  void push(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type == &PyLong_Type || type == &PyFloat_Type || type == &PyUnicode_Type || object == Py_None) return;
    if (is_a(object, reinterpret_cast<PyTypeObject*>(THPVariableClass))) return add(THPVariable_Unpack(object));
    if (seen_.insert(object).second) open_.push_back(object);
  }

  void add(const at::Tensor& tensor) {
    if (tensor.requires_grad())
      found_.push_back(tensor);
    else if (!other_.defined())
      other_ = tensor;
  }

  void visit(PyObject* object) {
    if (PyList_Check(object) || PyTuple_Check(object)) {
      PyObject** items = PySequence_Fast_ITEMS(object);
      for (Py_ssize_t i = PySequence_Fast_GET_SIZE(object); i-- > 0;) push(items[i]);
    } else if (PyDict_Check(object)) {
      PyObject *key = nullptr, *value = nullptr;
      for (Py_ssize_t place = 0; PyDict_Next(object, &place, &key, &value);) push(value);
    } else if (PyAnySet_CheckExact(object)) {
      for (pybind11::handle item : pybind11::reinterpret_borrow<pybind11::object>(object)) push(item.ptr());
    } else if (is_a(object, references_)) {
      pybind11::handle reference = object;
      if (reference.attr("is_owner")().cast<bool>()) push(keep(reference.attr("local_value")()));
    } else {
      visit_fields(object);
    }
  }

  // Of a dataclass, which keeps them in its __dict__ or in slots. A property in a field's place is the program's
  // code.
  void visit_fields(PyObject* object) {
    PyTypeObject* type = Py_TYPE(object);
    if (type->tp_dict == nullptr || !(type->tp_flags & Py_TPFLAGS_HEAPTYPE)) return;  // none of Python's own classes
    pybind11::handle cls(reinterpret_cast<PyObject*>(type));
    if (!pybind11::hasattr(cls, "__dataclass_fields__")) return;
    pybind11::object fields = cls.attr("__dataclass_fields__");
    if (!PyDict_Check(fields.ptr())) return;
    auto dict = pybind11::reinterpret_steal<pybind11::object>(PyObject_GenericGetDict(object, nullptr));
    if (!dict) PyErr_Clear();  // slots alone
    PyObject *name = nullptr, *field = nullptr;
    for (Py_ssize_t place = 0; PyDict_Next(fields.ptr(), &place, &name, &field);) {
      if (PyObject* value = dict ? PyDict_GetItemWithError(dict.ptr(), name) : nullptr) {
        push(value);
        continue;
      }
      auto slot = pybind11::reinterpret_steal<pybind11::object>(PyObject_GetAttr(cls.ptr(), name));
      PyObject* value = slot && Py_IS_TYPE(slot.ptr(), &PyMemberDescr_Type)
          ? PyMemberDescr_Type.tp_descr_get(slot.ptr(), object, cls.ptr())
          : nullptr;
      if (value)
        push(keep(pybind11::reinterpret_steal<pybind11::object>(value)));
      else
        PyErr_Clear();  // unset
    }
  }

  PyObject* keep(pybind11::object object) { return kept_.emplace_back(std::move(object)).ptr(); }

  PyTypeObject* const references_;
  std::vector<PyObject*> open_;  // alive: `output` holds them, or kept_
  ska::flat_hash_set<PyObject*> seen_;
  std::vector<pybind11::object> kept_;
  std::vector<at::Tensor> found_;
  at::Tensor other_;
};

}  // namespace minddp
